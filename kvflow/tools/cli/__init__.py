"""The command line: ``kvflow``, one module per subcommand."""

from kvflow.tools.cli.entry import main

__all__ = ["main"]

"""The command line: ``kvflow``, one module per subcommand."""

from kvflow.cli.entry import main

__all__ = ["main"]

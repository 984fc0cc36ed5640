"""The command line as ``python -m kvflow``, where the program ``kvflow`` is not on the path."""

import sys

from kvflow.tools.cli import main

sys.exit(main())

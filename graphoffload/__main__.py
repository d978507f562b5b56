"""Run the command line as `python -m graphoffload`."""

import sys

from graphoffload.cli import main

sys.exit(main())

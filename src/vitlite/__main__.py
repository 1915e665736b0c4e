"""Run the command `vitlite` with `python -m vitlite`."""

import sys

from vitlite.cli.main import main

sys.exit(main())

"""`python -m vitlite` is the command `vitlite`."""

import sys

from vitlite.cli import main

sys.exit(main())

"""`python -m vitlite` is the command `vitlite`."""

import sys

from vitlite.cli.main import main

sys.exit(main())

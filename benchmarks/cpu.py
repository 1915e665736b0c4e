"""Everything `vitlite bench` measures, with its options: the other libraries and engines, in one interleaved run.

python benchmarks/cpu.py --out docs
"""

import sys

from vitlite.cli.main import main

sys.exit(main(["bench", *sys.argv[1:]]))

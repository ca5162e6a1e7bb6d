"""The benchmarks are scripts, not a package: their folder is on the import path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

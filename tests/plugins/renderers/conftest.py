from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

# The helpers beside the tests, and those of the text tests, are imported by their own names.
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests/core/text")]

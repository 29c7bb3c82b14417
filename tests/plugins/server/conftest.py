"""Makes the helpers beside the tests, and those of the server's tests, importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "server")]

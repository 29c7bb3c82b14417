"""Makes the helpers importable: those beside the tests, and a real server around a scripted engine."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "server")]

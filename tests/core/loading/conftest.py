from __future__ import annotations

import sys
from pathlib import Path

# The table of hostile folders lies beside the tests and is imported by its own name.
sys.path.insert(0, str(Path(__file__).parent))

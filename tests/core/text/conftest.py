from __future__ import annotations

import sys
from pathlib import Path

# The helpers beside the tests are imported by their own names.
sys.path.insert(0, str(Path(__file__).parent))

"""Run the tests of rows of ``faults.toml``: all of them, or those that are named.

python tests/reliability/run_faults.py --seeds 3
python tests/reliability/run_faults.py R02 R24 --seeds 3
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> None:
    table = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", choices=[*table, []], metavar="ROW", help="R01 to R45")
    parser.add_argument("--seeds", type=int, default=3)
    arguments, options = parser.parse_known_args()
    tests = sorted({test for row in arguments.rows or table for test in table[row]["tests"]})
    command = [sys.executable, "-m", "pytest", "-m", "not gpu", "--seeds", str(arguments.seeds)]
    raise SystemExit(subprocess.run([*command, *options, *tests], cwd=ROOT).returncode)


if __name__ == "__main__":
    main()

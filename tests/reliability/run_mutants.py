"""Plant the faults of ``mutants.toml`` in a copy of the core, one at a time, and see whether a test fails.

python tests/reliability/run_mutants.py             all of them; the exit code is 1 if one survives
python tests/reliability/run_mutants.py 3 17        those with these numbers
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "treadle"
TABLE = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())


def mutated(mutant: dict[str, str]) -> str:
    """Return the text of the file with the fault. Raises ``ValueError`` if it no longer applies."""
    text = (CORE / mutant["file"]).read_text()
    if text.count(mutant["old"]) != 1:
        raise ValueError(
            f"{mutant['old']!r} does not stand once in {mutant['file']}: follow the code"
        )
    return text.replace(mutant["old"], mutant["new"])


def survives(mutant: dict[str, str], copy: Path) -> bool:
    """Run the tests of the file against ``copy``, a copy of the core."""
    file = copy / mutant["file"]
    sound = file.read_text()
    file.write_text(mutated(mutant))
    try:
        tests = TABLE["tests"][mutant["file"].partition("/")[0]]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        # Bytecode is kept by size and time in seconds: a fault may have the size of the sound text.
        environment = os.environ | {"PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if result.returncode not in (0, 1):
            raise SystemExit(result.stdout + result.stderr)
        return result.returncode == 0
    finally:
        file.write_text(sound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER")
    numbers = parser.parse_args().numbers or range(len(TABLE["mutant"]))
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "treadle"
        shutil.copytree(CORE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for number in numbers:
            mutant = TABLE["mutant"][number]
            lives = survives(mutant, copy)
            survivors += [number] if lives else []
            print(
                number,
                "SURVIVES" if lives else "found",
                mutant["file"],
                repr(mutant["new"]),
                flush=True,
            )
    print(f"{len(survivors)} of {len(numbers)} survive: {survivors}")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()

"""Run the offline examples of a vLLM source tree with treadle: ``run_examples.py VLLM_FOLDER``.

The lines that import vLLM and the names of models are replaced, nothing else. Prints one line for
each script: ``runs``, or the last line of what it said.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ("ported",)

MODEL = "demo:treadle-demo"
FOLDERS = ("offline_inference", "basic/offline_inference", "features", "deployment")
FOLDERS += ("generate", "tool_calling", "observability", "pooling")
IMPORT = re.compile(r"^(\s*)(?:from vllm|import vllm)\b", re.MULTILINE)


def ported(source: str) -> str:
    """Return a script with treadle's imports and the demo model."""
    source = re.sub(r"^(\s*)from vllm\b", r"\1from treadle.compat.vllm", source, flags=re.M)
    source = re.sub(
        r"^(\s*)import vllm\b(?! as)", r"\1import treadle.compat.vllm as vllm", source, flags=re.M
    )
    return re.sub(r"""\b(model(?:_name)?\s*=\s*)(["'])[^"']*/[^"']*\2""", rf'\1"{MODEL}"', source)


def run(script: Path, folder: Path) -> str:
    """Run one script and return what came of it."""
    file = folder / script.name
    file.write_text(ported(script.read_text()))
    try:
        done = subprocess.run(
            [sys.executable, str(file)], capture_output=True, text=True, cwd=folder, timeout=120
        )
    except subprocess.TimeoutExpired:
        return "took more than two minutes"
    if done.returncode == 0:
        return "runs"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {done.returncode}"


def main(root: Path) -> None:
    scripts = sorted(
        {
            script
            for folder in FOLDERS
            for script in (root / "examples" / folder).rglob("*.py")
            if IMPORT.search(script.read_text())
        }
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            results[script] = run(script, Path(folder))
            print(f"{script.relative_to(root / 'examples')}: {results[script][:200]}", flush=True)
    print(f"{sum(r == 'runs' for r in results.values())} of {len(results)} run")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

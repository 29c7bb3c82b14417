"""Install clients for the tests beside this file, each into a folder of its own.

    python tests/sdks/install.py                    # all of them: about 900 MB and four minutes
    python tests/sdks/install.py litellm node       # only these
    pytest tests/sdks -m "slow or not slow"     # codex, claude and schemathesis are slow

The folders lie in ``build/sdks``, or where ``TREADLE_SDKS`` says. Node packages need npm.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

__all__ = ("PACKAGES", "folder_of", "main")

PACKAGES = tomllib.loads(Path(__file__).with_name("packages.toml").read_text())
DEFAULT = Path(__file__).parents[2] / "build" / "sdks"


def folder_of(name: str) -> Path:
    """Return where a client is, or would be, installed."""
    return Path(os.environ.get("TREADLE_SDKS") or DEFAULT) / name


def command(name: str) -> list[str]:
    folder = str(folder_of(name))
    if name in PACKAGES["node"]:
        return [
            "npm",
            "install",
            "--no-audit",
            "--no-fund",
            "--prefix",
            folder,
            *PACKAGES["node"][name],
        ]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", folder]
    return [*pip, *PACKAGES["python"][name]]


def main() -> int:
    names = [name for kind in PACKAGES.values() for name in kind]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="*", help=f"of {', '.join(names)} (default: all)")
    chosen = parser.parse_args().name or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    for name in chosen:
        print(f"{name} into {folder_of(name)}", flush=True)
        folder_of(name).mkdir(parents=True, exist_ok=True)
        subprocess.run(command(name), check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

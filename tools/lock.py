"""Write ``requirements.lock``: every library of a default installation, with the hashes of its files.

The lock holds for Python 3.11 and later on every platform. It leaves out torch, which has a build for each
kind of device, and the CUDA libraries that come with some of them: ``constraints.txt`` pins torch.
Needs uv (``pip install uv``) and a package index. Arguments go to ``uv pip compile``:

    python tools/lock.py              keep the versions that still fit, lock what is new
    python tools/lock.py --upgrade    take the newest versions
"""

from __future__ import annotations

import re
import subprocess
import sys

from repository import ROOT, members

__all__ = ("LOCK", "locked", "main", "requirements", "torch_part")

LOCK = ROOT / "requirements.lock"
BLOCK = re.compile(r"(?m)^(?P<name>[a-z0-9._-]+)==(?P<version>[^ ]+).*\n(?:[ ].*\n)*")
OWN_VERSION = re.compile(r"[<>=!~;].*")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def requirements() -> dict[str, list[str]]:
    """Return what each member of a default installation needs of others.

    What the members are built with is part of it, and an extra of a member is what it brings.
    """
    extras = {
        f"{member.name}[{extra}]": needs
        for member in members()
        for extra, needs in member.pyproject["project"].get("optional-dependencies", {}).items()
    }
    declared = {}
    for member in members():
        if not member.pyproject.get("tool", {}).get("treadle", {}).get("default", True):
            continue
        needs = member.pyproject["project"].get("dependencies", [])
        brought = [n for need in needs for n in extras.get(OWN_VERSION.sub("", need), [need])]
        build = member.pyproject["build-system"]["requires"]
        declared[member.name] = [n for n in [*brought, *build] if not n.startswith("treadle-")]
    return declared


def torch_part(name: str) -> bool:
    """Return whether a distribution comes with some build of torch."""
    return name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-"))


def locked(text: str) -> dict[str, dict[str, list[str]]]:
    """Return the hashes of each version of each name; markers tell several versions apart."""
    found: dict[str, dict[str, list[str]]] = {}
    for block in BLOCK.finditer(text):
        found.setdefault(block["name"], {})[block["version"]] = HASH.findall(block[0])
    return found


def main(arguments: list[str]) -> int:
    needs = sorted({need for declared in requirements().values() for need in declared})
    command = [
        "uv",
        "pip",
        "compile",
        "--universal",
        "--generate-hashes",
        "--python-version",
        "3.11",
    ]
    command += [
        "--constraint",
        "constraints.txt",
        "--custom-compile-command",
        "python tools/lock.py",
    ]
    command += ["--no-annotate", "--quiet", *arguments, "--output-file", str(LOCK), "-"]
    process = subprocess.run(command, cwd=ROOT, input="\n".join(needs), text=True, check=False)
    if process.returncode == 0:
        text = LOCK.read_text()
        LOCK.write_text(BLOCK.sub(lambda b: "" if torch_part(b["name"]) else b[0], text))
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

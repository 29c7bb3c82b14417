"""Print ``requirements-dev.txt`` so that uv finds the least version of each library that members and tests allow.

    python tools/oldest.py | uv pip install --resolution lowest-direct -r -

Nothing pins torch then, nor the triton that belongs to it. uv takes the least version of what is required
directly, which the requirements of members are and those of their extras are not: they are printed, too.
"""

from __future__ import annotations

import re

from lock import requirements
from repository import ROOT

__all__ = ("main", "oldest")

TESTED = ("transformers>=5.23", "huggingface_hub>=2.2")
"""What tests need beyond what members allow. Treadle is compared with transformers' models and templates, which differed
before, and the library of the hub sent tokens to another port of the same host."""
PIN_OF_TORCH = re.compile(r"^-c .*\n", re.MULTILINE)
PIN_OF_TRITON = re.compile(r"^triton==[^;\n]+", re.MULTILINE)


def oldest() -> list[str]:
    """Return the lines of a requirements file, to be read in the root of the tree."""
    text = (ROOT / "requirements-dev.txt").read_text()
    text = PIN_OF_TRITON.sub("triton>=3", PIN_OF_TORCH.sub("", text))
    declared = {need for needs in requirements().values() for need in needs}
    return [*text.splitlines(), *sorted(declared), *TESTED]


def main() -> None:
    print("\n".join(oldest()))


if __name__ == "__main__":
    main()

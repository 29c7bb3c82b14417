"""Write ``core/treadle/known_plugins.py`` from the pyprojects of this repository.

python tools/known_plugins.py            write it
python tools/known_plugins.py --check    exit with 1 if it is out of date

``tools/sync.py`` writes it too, with everything else that is derived.
"""

from __future__ import annotations

import argparse
import sys

from repository import ROOT, members

__all__ = ("TARGET", "render")

TARGET = ROOT / "core" / "treadle" / "known_plugins.py"
HEADER = '''"""Which distribution of treadle provides which key: for ``install treadle-awq`` in messages.

Written by tools/known_plugins.py from the pyprojects of the repository. DO NOT EDIT.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ("DISTRIBUTIONS", "KNOWN")

'''


def render() -> str:
    """The text of the module."""
    keys = {
        entry.id: member.name
        for member in members()
        for entry in member.entry_points
        if entry.kind != "overrides"
    }
    lines = ["KNOWN: Mapping[str, str] = {"]
    lines += [f'    "{key}": "{keys[key]}",' for key in sorted(keys)]
    lines += ["}", "", "DISTRIBUTIONS: frozenset[str] = frozenset(", "    {"]
    lines += [f'        "{name}",' for name in sorted(member.name for member in members())]
    return HEADER + "\n".join([*lines, "    }", ")", ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    text = render()
    if parser.parse_args().check:
        return int(not TARGET.exists() or TARGET.read_text() != text)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

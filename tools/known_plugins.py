"""Write ``core/treadle/known_plugins.py`` from the pyprojects of this repository.

python tools/known_plugins.py            write it
python tools/known_plugins.py --check    exit with 1 if it is out of date

``tools/sync.py`` writes it too, with everything else that is derived.
"""

from __future__ import annotations

import argparse
import sys

from repository import ROOT, Member, kits, members

__all__ = ("TARGET", "render")

TARGET = ROOT / "core" / "treadle" / "known_plugins.py"
HEADER = '''"""Which distribution of treadle provides which key, and where its source lies in a clone.

Written by tools/known_plugins.py from the pyprojects of the repository. DO NOT EDIT.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ("DISTRIBUTIONS", "KITS", "KNOWN", "install_hint")


def install_hint(*distributions: str) -> str:
    """Return how to install these distributions, with the kits that they depend on.

    Our own are not published, so the command installs them from a clone.
    """
    names = [name.partition("[")[0] for name in distributions]
    if not all(name in DISTRIBUTIONS for name in names):
        return f"pip install {' '.join(distributions)}"
    pairs = zip(names, distributions, strict=True)
    kits = dict.fromkeys(kit for name in names for kit in KITS.get(name, ()))
    folders = [f"'./{DISTRIBUTIONS[kit]}'" for kit in kits]
    folders += [f"'./{DISTRIBUTIONS[name]}{whole[len(name) :]}'" for name, whole in pairs]
    return f"from a clone: pip install {' '.join(folders)}"


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
    lines += ["}", "", "DISTRIBUTIONS: Mapping[str, str] = {"]
    lines += [f'    "{m.name}": "{m.path}",' for m in sorted(members(), key=lambda m: m.name)]
    lines += ["}", "", "KITS: Mapping[str, tuple[str, ...]] = {"]
    for member in sorted(members(), key=lambda m: m.name):
        if needed := kits_of(member):
            names = ", ".join(f'"{name}"' for name in needed) + "," * (len(needed) == 1)
            lines.append(f'    "{member.name}": ({names}),')
    return HEADER + "\n".join([*lines, "}", ""])


def kits_of(member: Member) -> list[str]:
    """Return the names of the kits that the member needs, those that they need first."""
    direct = sorted((k for k in kits() if k.name in member.dependencies), key=lambda k: k.name)
    return list(dict.fromkeys(name for kit in direct for name in (*kits_of(kit), kit.name)))


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

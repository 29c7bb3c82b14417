"""Write ``core/treadle/known_plugins.json`` from the pyprojects of this repository.

python tools/known_plugins.py            write it
python tools/known_plugins.py --check    exit with 1 if it is out of date

``tools/sync.py`` writes it too, with everything else that is derived.
"""

from __future__ import annotations

import argparse
import json
import sys

from repository import ROOT, Member, kits, members

__all__ = ("TARGET", "render")

TARGET = ROOT / "core" / "treadle" / "known_plugins.json"
ALWAYS_ALLOWED = (
    "treadle-core",
    "treadle-server",
    "treadle-cli",
    "treadle-dummy",
    "treadle-executor-uni",
    "treadle-hf",
    "treadle-hf-tokenizer",
    "treadle-jinja",
    "treadle-pt",
    "treadle-safetensors",
    "treadle-sdpa",
)
"""What ``treadle.known_plugins`` says of them."""


def render() -> str:
    """The text of the table."""
    keys = {
        entry.id: member.name
        for member in members()
        for entry in member.entry_points
        if entry.kind != "overrides"
    }
    ordered = sorted(members(), key=lambda m: m.name)
    table = {
        "keys": dict(sorted(keys.items())),
        "distributions": {m.name: m.path for m in ordered},
        "kits": {m.name: kit_names for m in ordered if (kit_names := kits_of(m))},
        "always_allowed": ALWAYS_ALLOWED,
    }
    return json.dumps(table, indent=2) + "\n"


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

"""The generated table agrees with the pyprojects, and every hook has its method."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

from treadle.api.hookspecs import First
from treadle.plugins import KINDS, Host

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_is_up_to_date():
    tool = ROOT / "tools" / "known_plugins.py"
    done = subprocess.run([sys.executable, str(tool), "--check"])
    assert done.returncode == 0, "run: python tools/known_plugins.py"


def test_every_keyed_hook_has_a_typed_method():
    """Its arguments are those of the hook, without what the host adds itself."""
    plural = {"many"}
    for kind in KINDS.values():
        if kind.owner != "treadle-core" or kind.mode in ("bid", "always"):
            continue
        method = kind.hook.removeprefix("treadle_") + ("s" if kind.mode in plural else "")
        ours = set(inspect.signature(getattr(Host, method)).parameters) - {"self"}
        hook = set(inspect.signature(getattr(First, kind.hook)).parameters) - {"self"}
        assert ours == {
            "names" if a == "name" and kind.mode in plural else a
            for a in hook - {"options", "host"}
        }

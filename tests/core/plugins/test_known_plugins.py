"""The generated table agrees with the pyprojects, and declarations of kinds agree with what they name."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

from treadle.api import types
from treadle.plugins import installed_kinds

ROOT = Path(__file__).resolve().parents[3]


def test_the_table_is_up_to_date():
    tool = ROOT / "tools" / "known_plugins.py"
    process = subprocess.run([sys.executable, str(tool), "--check"])
    assert process.returncode == 0, "run: python tools/known_plugins.py"


def test_a_declaration_agrees_with_its_hook():
    """The key is an argument of the hook, and the hook returns what the kind builds."""
    for kind in installed_kinds().values():
        hook = getattr(kind.specs, kind.hook)
        arguments = inspect.signature(hook).parameters
        if kind.mode in ("one", "many"):
            assert kind.key_argument in arguments, kind.name
        if kind.builds is not None:
            assert kind.builds.__name__ in str(hook.__annotations__["return"]), kind.name
        for name in kind.methods:
            protocol, _, method = name.partition(".")
            owner = getattr(types, protocol)
            assert method in {*vars(owner), *owner.__annotations__}, name


def test_every_kind_has_a_suite_a_template_and_a_page():
    for kind in installed_kinds().values():
        assert kind.suite, kind.name
        assert (ROOT / "cli/treadle_cli/templates" / kind.name).is_dir(), kind.name
        assert (ROOT / f"docs/ref/plugins/{kind.name}.md").is_file(), kind.name

"""``weft plugin list`` and ``weft plugin show``."""

from __future__ import annotations

import json

import pytest

from weft_cli import conformance

FILE = """
from typing import Annotated, Literal
import msgspec
from weft.api import impl

WEFT = {"policies": ["mine"]}


class Options(msgspec.Struct, frozen=True):
    depth: Annotated[int, msgspec.Meta(ge=1, description="How deep.")] = 2
    mode: Literal["a", "b"] = "a"
    name: str | None = None


WEFT_OPTIONS = {"policies:mine": Options}


@impl
def weft_policy(name):
    return name


@impl(wrapper=True)
def weft_model(architecture):
    return (yield)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_list_by_kind(weft):
    lines = weft("plugin", "list", "policies").out.splitlines()
    assert lines[0].split() == ["KIND", "KEY", "DISTRIBUTION", "STATE", "NOTE"]
    assert lines[1].split()[:5] == ["policies", "fcfs", "weft-core", "0.1.0", "ready"]
    assert all(line.startswith("policies ") for line in lines[1:])


def test_list_as_json_with_flags(weft, file):
    done = weft(
        "plugin",
        "list",
        "policies",
        "--json",
        "--plugin-file",
        file,
        "--no-plugin",
        "policies:fcfs",
    )
    rows = {row["key"]: row for row in json.loads(done.out)}
    assert rows["fcfs"]["state"] == "disabled"
    assert rows["mine"]["distribution"] == "mine.py"
    assert rows["mine"]["note"].startswith("local file ")


def test_list_of_an_unknown_kind(weft):
    done = weft("plugin", "list", "policy")
    assert done.code == 1
    assert done.err.startswith(
        "weft: there is no plugin kind 'policy'; known kinds: model_sources, "
    )


def test_show_hooks_and_options(weft, file):
    done = weft("plugin", "show", "policies:mine", "--plugin-file", file, "--json")
    shown = json.loads(done.out)
    assert (shown["hooks"], shown["wrappers"]) == (["weft_policy"], ["weft_model"])
    assert shown["options"] == [
        {
            "flag": "--plugin.policies.mine.depth",
            "type": "integer",
            "default": "2",
            "description": "How deep.",
        },
        {
            "flag": "--plugin.policies.mine.mode",
            "type": '"a" | "b"',
            "default": '"a"',
            "description": "",
        },
        {
            "flag": "--plugin.policies.mine.name",
            "type": "string | null",
            "default": "null",
            "description": "",
        },
    ]
    text = weft("plugin", "show", "policies:mine", "--plugin-file", file).out
    assert "hooks     weft_policy\n  wraps     weft_model\n" in text
    assert "--plugin.policies.mine.depth  integer" in text


def test_show_a_distribution(weft):
    out = weft("plugin", "show", "Weft_Core").out
    assert out.startswith("weft-core 0.1.0\n") and "attention:sdpa" in out


@pytest.mark.parametrize(
    ("id", "code", "message"),
    [
        ("policies:nope", 1, "weft: no plugin provides policies:nope (known: "),
        ("nobody", 2, "weft: no plugins come from 'nobody'; write kind:key or one of: "),
    ],
)
def test_show_something_missing(weft, id, code, message):
    done = weft("plugin", "show", id)
    assert done.code == code and done.err.startswith(message)


def test_new_writes_a_project_and_says_what_to_do(weft, tmp_path):
    done = weft("plugin", "new", "policies", "patient", "--folder", str(tmp_path / "made"))
    assert done.code == 0 and "weft-patient && pip install -e . pytest && pytest" in done.out
    assert (tmp_path / "made/weft-patient/weft_patient/__init__.py").is_file()
    assert weft("plugin", "new", "policy", "x").code == 2
    taken = weft("plugin", "new", "policies", "fcfs")
    assert taken.code == 0 and 'name the entry point\n"policies.fcfs" in the group' in taken.out


@pytest.mark.parametrize(("text", "code"), [("return P()", 0), ("return [P()][1]", 1)])
def test_test_runs_the_suites_on_one_plugin(weft_tests, text, code):
    assert weft_tests(text) == code


@pytest.fixture
def weft_tests(weft, tmp_path):
    def run(text):
        file = tmp_path / "mine.py"
        file.write_text(
            "from weft.scheduler.policies import FirstCome as P\nfrom weft.api import impl\n"
            'WEFT = {"policies": ["mine"]}\n@impl\ndef weft_policy(name):\n'
            f'    if name == "mine":\n        {text}\n'
        )
        return weft("plugin", "test", "policies:mine", "--plugin-file", str(file)).code

    return run


def test_test_of_something_missing(weft):
    assert weft("plugin", "test", "policies:nope").code == 1
    done = weft("plugin", "test", "policies")
    assert (done.code, done.err[:45]) == (2, "weft: 'policies' names no plugin; write kind:")


def test_test_without_the_distribution_of_the_suite(weft, monkeypatch):
    monkeypatch.setitem(conformance.SUITES, "policies", "weft_absent.testing:PolicySuite")
    done = weft("plugin", "test", "policies:fcfs")
    assert (done.code, done.out) == (2, "")
    assert done.err == "weft: the suite of policies is in weft-core; pip install weft-core\n"


def test_lock_and_locked(weft, tmp_path):
    assert "weft.lock: " in weft("plugin", "lock").out
    rows = json.loads((tmp_path / "weft.lock").read_text())["plugins"]
    assert {
        "id": "policies:fcfs",
        "distribution": "weft-core",
        "version": "0.1.0",
        "generation": 1,
    } in rows
    done = weft("generate", "--locked", "weft.lock", "--no-plugin", "policies:priority", "-p", "x")
    assert done.code == 1
    assert "- policies:priority from weft-core 0.1.0 is gone" in done.err
    done = weft("plugin", "lock", "no/such/folder/weft.lock")
    assert done.code == 2 and "cannot be written" in done.err

"""``treadle plugin list`` and ``treadle plugin show``."""

from __future__ import annotations

import json
import tomllib

import pytest

from treadle.plugins import installed_kinds
from treadle_cli import conformance
from treadle_cli.description import OptionRow
from treadle_cli.option_examples import toml_example

FILE = """
from typing import Annotated, Literal
import msgspec
from treadle.api import impl

TREADLE = {"scheduling_policies": ["mine"]}


class Options(msgspec.Struct, frozen=True):
    depth: Annotated[int, msgspec.Meta(ge=1, description="How deep.")] = 2
    mode: Literal["a", "b"] = "a"
    name: str | None = None


TREADLE_OPTIONS = {"scheduling_policies:mine": Options}


@impl
def treadle_scheduling_policy(name):
    return name


@impl(wrapper=True)
def treadle_model(architecture):
    return (yield)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_list_by_kind(treadle):
    lines = treadle("plugin", "list", "scheduling_policies").out.splitlines()
    assert lines[0].split() == ["KIND", "KEY", "DISTRIBUTION", "STATE", "NOTE"]
    assert lines[1].split()[:5] == ["scheduling_policies", "fcfs", "treadle-core", "0.1.0", "ready"]
    assert all(line.startswith("scheduling_policies ") for line in lines[1:])


def test_list_as_json_with_flags(treadle, file):
    result = treadle(
        "plugin",
        "list",
        "scheduling_policies",
        "--json",
        "--plugin-file",
        file,
        "--disable-plugin",
        "scheduling_policies:fcfs",
    )
    rows = {row["key"]: row for row in json.loads(result.out)}
    assert rows["fcfs"]["state"] == "disabled"
    assert rows["mine"]["distribution"] == "mine.py"
    assert rows["mine"]["note"].startswith("local file ")


def test_list_of_an_unknown_kind(treadle):
    result = treadle("plugin", "list", "policy")
    assert result.code == 2
    assert result.err.startswith(
        "treadle: there is no plugin kind 'policy'; known kinds: model_sources, "
    )


def test_show_hooks_and_options(treadle, file):
    result = treadle("plugin", "show", "scheduling_policies:mine", "--plugin-file", file, "--json")
    details = json.loads(result.out)
    assert (details["hooks"], details["wrappers"]) == (
        ["treadle_scheduling_policy"],
        ["treadle_model"],
    )
    assert details["options"] == [
        {
            "flag": "--plugin.scheduling_policies.mine.depth",
            "type": "integer",
            "default": "2",
            "description": "How deep.",
        },
        {
            "flag": "--plugin.scheduling_policies.mine.mode",
            "type": '"a" | "b"',
            "default": '"a"',
            "description": "",
        },
        {
            "flag": "--plugin.scheduling_policies.mine.name",
            "type": "string | null",
            "default": "null",
            "description": "",
        },
    ]
    text = treadle("plugin", "show", "scheduling_policies:mine", "--plugin-file", file).out
    assert "hooks     treadle_scheduling_policy\n  wraps     treadle_model\n" in text
    assert "--plugin.scheduling_policies.mine.depth  integer" in text


def test_show_writes_options_as_the_file_of_config_has_them(treadle, tmp_path):
    """What is shown is read back as it was, whatever characters a default has."""
    path = tmp_path / "odd.py"
    path.write_text(
        FILE.replace("name: str | None = None", "name: str | None = None\n    must: int")
        .replace("frozen=True", "frozen=True, kw_only=True")
        .replace(
            'mode: Literal["a", "b"] = "a"',
            'mode: str = "q\\"\\\\ \\x7f ü"',
        )
    )
    out = treadle("plugin", "show", "scheduling_policies:mine", "--plugin-file", str(path)).out
    text = out.partition("In the file of --config:\n\n")[2]
    table = tomllib.loads(text)["plugin_options"]["scheduling_policies:mine"]
    assert table == {"depth": 2, "mode": 'q"\\ \x7f ü'}
    assert "# name = … (string | null)" in text and "# must = … (integer, required)" in text
    config = tmp_path / "treadle.toml"
    config.write_text(text + "must = 1\n")
    command = ["serve", "--plugin-file", str(path), "--config", str(config), "--explain"]
    result = treadle(*command, "--scheduling-policy", "mine")
    assert result.code == 0, result.err


def test_a_default_that_is_a_table_stays_on_its_line():
    rows = [OptionRow("--plugin.k.x.tree", "object", '{"a b":[1.5,{"c":null,"d":true}]}', "")]
    text = toml_example("k:x", [*rows, OptionRow("--plugin.k.x.none", "object", "{}", "")])
    assert tomllib.loads(text) == {
        "plugin_options": {"k:x": {"tree": {"a b": [1.5, {"d": True}]}, "none": {}}}
    }


def test_show_a_distribution(treadle):
    out = treadle("plugin", "show", "Treadle_Core").out
    assert out.startswith("treadle-core 0.1.0\n") and "model_sources:file" in out


@pytest.mark.parametrize(
    ("id", "code", "message"),
    [
        (
            "scheduling_policies:nope",
            2,
            "treadle: no plugin provides scheduling_policies:nope (known: ",
        ),
        ("nobody", 2, "treadle: no plugins come from 'nobody'; write kind:key or one of: "),
    ],
)
def test_show_something_missing(treadle, id, code, message):
    result = treadle("plugin", "show", id)
    assert result.code == code and result.err.startswith(message)


def test_new_writes_a_project_and_says_what_to_do(treadle, tmp_path):
    result = treadle(
        "plugin", "new", "scheduling_policies", "patient", "--folder", str(tmp_path / "made")
    )
    assert result.code == 0 and "treadle-patient && pip install -e . pytest && pytest" in result.out
    assert (tmp_path / "made/treadle-patient/treadle_patient/__init__.py").is_file()
    assert treadle("plugin", "new", "policy", "x").code == 2
    builtin_key = treadle("plugin", "new", "scheduling_policies", "fcfs")
    assert (
        builtin_key.code == 0
        and 'name the entry point\n"scheduling_policies.fcfs" in the group' in builtin_key.out
    )


@pytest.mark.parametrize(("text", "code"), [("return P()", 0), ("return [P()][1]", 1)])
def test_test_runs_the_suites_on_one_plugin(treadle_tests, text, code):
    assert treadle_tests(text).code == code


@pytest.fixture
def treadle_tests(treadle, tmp_path):
    def run(text, *options):
        file = tmp_path / "mine.py"
        file.write_text(
            "from treadle.scheduler.policies import FirstCome as P\nfrom treadle.api import impl\n"
            'TREADLE = {"scheduling_policies": ["mine"]}\n@impl\ndef treadle_scheduling_policy(name):\n'
            f'    if name == "mine":\n        {text}\n'
        )
        return treadle(
            "plugin", "test", "scheduling_policies:mine", "--plugin-file", str(file), *options
        )

    return run


@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        ("import os; os._exit(0)", (), "ended the process of its tests (exited with status 0)"),
        # Whether the tests have begun to hang when their time is over does not matter.
        (
            "import threading; threading.Event().wait()",
            ("--timeout", "1"),
            "did not end within 1 s",
        ),
        (
            "import threading; threading.Thread(target=threading.Event().wait, name='left').start()\n"
            "        return P()",
            (),
            "left a thread that keeps a server from ending: left",
        ),
    ],
    ids=["exit", "hang", "thread"],
)
def test_no_plugin_passes_by_harming_the_process_of_its_tests(treadle_tests, fault, options, words):
    """Faults of a hook, which passes all the same; the import runs in a child of its own."""
    result = treadle_tests(fault, *options)
    assert result.code == 1
    assert words in result.err


def test_test_of_something_missing(treadle):
    assert treadle("plugin", "test", "scheduling_policies:nope").code == 2
    result = treadle("plugin", "test", "scheduling_policies")
    assert (result.code, result.err[:59]) == (
        2,
        "treadle: 'scheduling_policies' names no plugin; write kind:",
    )


def test_test_without_the_distribution_of_the_suite(treadle, monkeypatch):
    monkeypatch.setitem(
        conformance.SUITES, "scheduling_policies", "treadle_absent.testing:PolicySuite"
    )
    result = treadle("plugin", "test", "scheduling_policies:fcfs")
    assert (result.code, result.out) == (2, "")
    assert (
        result.err
        == "treadle: the suite of scheduling_policies is in treadle-core; from a clone: pip install './core'\n"
    )


def test_lock_and_locked(treadle, tmp_path):
    assert "treadle.lock: " in treadle("plugin", "lock", "--allow-editable").out
    rows = json.loads((tmp_path / "treadle.lock").read_text())["plugins"]
    assert {
        "id": "scheduling_policies:fcfs",
        "distribution": "treadle-core",
        "version": "0.1.0",
        "generation": 1,
    } in rows
    result = treadle(
        "generate",
        "--plugin-lock-file",
        "treadle.lock",
        "--disable-plugin",
        "scheduling_policies:priority",
        "-p",
        "x",
    )
    assert result.code == 1
    assert "- scheduling_policies:priority (v1) from treadle-core 0.1.0\n" in result.err
    result = treadle("plugin", "lock", "--allow-editable", "no/such/folder/treadle.lock")
    assert result.code == 2 and "cannot be written" in result.err


@pytest.mark.parametrize("kind", installed_kinds())
def test_docs_prints_the_page_of_a_kind(treadle, kind):
    """From the installed distribution: an author has no clone of the repository."""
    out = treadle("plugin", "docs", kind).out
    assert out.startswith("# ") and "**When it fails.** " in out
    assert f"{installed_kinds()[kind].hook}(" in out and "Suite" in out
    assert "<!--" not in out and ".md)" not in out


def test_docs_of_a_kind_of_another_distribution_are_its_declaration(monkeypatch):
    from dataclasses import replace

    from treadle.api.kinds import SCHEDULING_POLICIES
    from treadle_cli import plugin_pages

    kinds = {"queues": replace(SCHEDULING_POLICIES, name="queues")}
    monkeypatch.setattr(plugin_pages, "installed_kinds", lambda: kinds)
    page = plugin_pages.page("queues")
    assert "group `treadle.queues`" in page and "class SchedulingPolicy(Protocol):" in page
    assert "treadle_scheduling_policy(self, name: 'str'" in page


def test_docs_of_an_unknown_kind(treadle):
    result = treadle("plugin", "docs", "policy")
    assert result.code == 2 and "there is no plugin kind 'policy'; known kinds: " in result.err

"""What holds for the keys and options of each kind, before anything of a plugin or model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from treadle.api.plugin_kind import FALLBACK, PluginKind
from treadle.config import EngineConfig, PluginConfig, config_sections, from_options
from treadle.errors import ConfigError, TreadleError
from treadle.known_plugins import known_keys
from treadle.plugins import PluginManager, installed_kinds
from treadle.plugins.entries import Entry, scan
from treadle.testing.examination.findings import entry_findings
from treadle.testing.examination.listing import rows
from treadle.text.assets import open_plugins

KINDS = [pytest.param(kind, id=kind.name) for kind in installed_kinds().values()]
CLAIMED = [p for p in KINDS if known_keys(p.values[0].name)]
NAMED = [p for p in KINDS if p.values[0].option]

PLUGIN = """
from typing import Annotated
import msgspec
from treadle.api import impl

TREADLE = {{"{kind}": ["mine"]}}

class Options(msgspec.Struct, frozen=True):
    bits: Annotated[int, msgspec.Meta(ge=2, le=8)] = 4

TREADLE_OPTIONS = {{"{kind}:mine": Options}}

@impl
def {hook}():
    raise RuntimeError("called before the options were checked")
"""


def claimed(kind: PluginKind[Any], *thieves: str, **config: Any) -> tuple[PluginManager, str, str]:
    """The plugins with others that claim a key, the key, and its owner without them."""
    installed = {e.key: e.dist for e in scan() if e.kind == kind.name and e.key != FALLBACK}
    key = next(key for key in known_keys(kind.name) if key in installed)

    def source() -> Iterator[Entry]:
        # Before all others, as a folder that comes first would be.
        yield from (Entry(kind.name, key, "nowhere", d, "1.0", generation=1) for d in thieves)
        yield from scan()

    pins = [f"{kind.name}:{key}={dist}" for dist in config.pop("pins", ())]
    plugins = PluginManager(PluginConfig(pin_plugin=pins, **config), source=source)
    return plugins, key, installed[key]


@pytest.mark.parametrize("kind", CLAIMED)
def test_who_claims_a_key_takes_nothing_and_is_told_the_pin(
    kind: PluginKind[Any], caplog: pytest.LogCaptureFixture
) -> None:
    plugins, key, owner = claimed(kind, "acme", "thief")
    assert plugins.choose(kind.name, key).dist == owner and key in plugins.keys(kind.name)
    worker = PluginManager.from_selection(plugins.selection())
    assert worker.choose(kind.name, key).dist == owner
    (line,) = [text for text in caplog.messages if "acme 1.0, thief 1.0" in text]
    assert f"--pin-plugin {kind.name}:{key}=DIST" in line
    if kind.mode == "always":
        return  # all of them are called: none is in the way of another
    notes = {r.distribution: r.note for r in rows(plugins, kind.name) if r.key == key}
    assert "conflict" not in notes.pop(owner)
    pin = f"--pin-plugin {kind.name}:{key}"
    assert all(f"conflict: {owner} is used; {pin}={d} uses this one" in notes[d] for d in notes)
    found = {
        e.dist: [(f.code, f"{pin}={e.dist}" in f.text) for f in entry_findings(plugins, e)]
        for e in plugins.entries
        if (e.kind, e.key) == (kind.name, key)
    }
    assert found.pop(owner) == []
    assert found == {"acme": [("conflict", True)], "thief": [("conflict", True)]}


@pytest.mark.parametrize("kind", CLAIMED)
def test_a_pin_decides(kind: PluginKind[Any], caplog: pytest.LogCaptureFixture) -> None:
    plugins, key, owner = claimed(kind, "acme", pins=["acme"])
    assert plugins.choose(kind.name, key).dist == "acme"
    plugins, key, owner = claimed(kind, "acme", pins=[owner := claimed(kind)[2]])
    assert plugins.choose(kind.name, key).dist == owner
    assert not caplog.messages


def test_a_lock_keeps_its_owner(tmp_path: Path) -> None:
    kind = installed_kinds()["tool_parsers"]
    file = tmp_path / "treadle.lock"
    before, key, owner = claimed(kind)
    file.write_bytes(msgspec.json.encode(before.lock()))
    with pytest.raises(TreadleError, match=rf"\+ tool_parsers:{key} \(v1\) from acme"):
        claimed(kind, "acme", plugin_lock_file=str(file))
    plugins, *_ = claimed(kind, "acme", plugin_lock_file=str(file), disable_plugin=["acme"])
    assert plugins.choose(kind.name, key).dist == owner


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"bist": 4}, "has no option 'bist'; its options: bits; did you mean 'bits'?"),
        ({"bits": "many"}, "is 'many': Expected `int`"),
        ({"bits": 16}, "is 16: Expected `int` <= 8"),
    ],
    ids=["name", "type", "range"],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("site")
def test_a_wrong_option_of_a_plugin_that_is_not_used_stops_the_start(
    kind: PluginKind[Any], value: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = tmp_path / f"{kind.name}_options.py"
    file.write_text(PLUGIN.format(kind=kind.name, hook=kind.hook))
    id = f"{kind.name}:mine"
    config = from_options(model="nowhere", plugin_file=[str(file)], plugin_options={id: value})
    with pytest.raises(ConfigError) as caught:
        open_plugins(config)
    assert words in str(caught.value) and kind.name in str(caught.value)


def misspelled(kind: PluginKind[Any]) -> tuple[EngineConfig, str, str]:
    """An engine that is told a wrong key, the key, and the right one."""
    right = PluginManager().keys(kind.name)[-1]
    wrong = right + right[-1]
    field = kind.option.removeprefix("--").replace("-", "_")
    sections = (getattr(EngineConfig(), name) for name, _ in config_sections())
    current = next(getattr(s, field) for s in sections if field in s.__struct_fields__)
    value = [wrong] if isinstance(current, list) else wrong
    return from_options(model="nowhere", **{field: value}), wrong, right


@pytest.mark.parametrize("kind", NAMED)
def test_a_wrong_name_stops_the_start_with_the_right_one(kind: PluginKind[Any]) -> None:
    config, wrong, right = misspelled(kind)
    with pytest.raises(TreadleError) as caught:
        open_plugins(config)
    assert str(caught.value).startswith(f"{kind.option} is {wrong!r}: ")
    assert f"did you mean {right!r}?" in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "config",
    [
        lambda wrong: {"plugin_options": {f"{wrong}:mine": {}}},
        lambda wrong: {"plugin_time_budget": {wrong: 1.0}},
        lambda wrong: {"pin_plugin": [f"{wrong}:mine=acme"]},
    ],
    ids=["options", "budget", "pin"],
)
def test_a_wrong_kind_is_told_the_right_one(kind: PluginKind[Any], config: Any) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{kind.name}'"):
        PluginManager(PluginConfig(**config(kind.name[:-1])), source=list)

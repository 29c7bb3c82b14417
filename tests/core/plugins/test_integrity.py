"""The code of installed plugins: what edits it is drift, and a hostile list of files reads nothing."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

import treadle
from treadle.errors import ConfigError, PluginConflictError
from treadle.plugins import PluginManager
from treadle.testing.examination.integrity import code_of, codes, lock_with_code

MORE = "acme_more.py"


def record(site: Any, *more: str) -> None:
    """Give each distribution the list of files that an installer writes."""
    for module in ("acme_awq", "acme_fp8"):
        lines = [f"{module}.py,,", f"{module}-1.0.dist-info/METADATA,,", *more]
        (site.folder / f"{module}-1.0.dist-info" / "RECORD").write_text("\n".join(lines) + "\n")


@pytest.fixture
def lock(site: Any) -> Path:
    """The lock file of two distributions, with their code."""
    site.scheme("acme-awq", "awq")
    site.scheme("acme-fp8", "fp8")
    (site.folder / MORE).write_text("")
    record(site, f"{MORE},,")
    file: Path = site.folder / "treadle.lock"
    file.write_bytes(msgspec.json.encode(lock_with_code(site.plugin_manager())))
    return file


def compare(site: Any, lock: Path) -> None:
    site.plugin_manager(plugin_lock_file=str(lock))


def edit(folder: Path) -> None:
    with (folder / "acme_awq.py").open("a") as code:
        code.write("# edited\n")


def unlist(folder: Path) -> None:
    (folder / "acme_awq-1.0.dist-info" / "RECORD").unlink()


def hide(folder: Path) -> None:
    (folder / "acme_awq-1.0.dist-info" / "RECORD").write_text("acme_awq.py,,\n")


def make_editable(folder: Path) -> None:
    data = {"url": folder.as_uri(), "dir_info": {"editable": True}}
    (folder / "acme_awq-1.0.dist-info" / "direct_url.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "now"),
    [(edit, ""), (hide, ""), (unlist, "unlisted"), (make_editable, "editable")],
)
def test_other_code_of_one_version_is_drift(site: Any, lock: Path, change: Any, now: str) -> None:
    compare(site, lock)
    before = codes(site.plugin_manager())
    change(site.folder)
    with pytest.raises(PluginConflictError) as caught:
        compare(site, lock)
    after = codes(site.plugin_manager())
    line = f"acme-awq: {before['acme-awq']} is locked, {after['acme-awq']} is installed"
    assert line in str(caught.value) and "acme-fp8" not in str(caught.value)
    assert after["acme-awq"] != before["acme-awq"] and now in after["acme-awq"]


def test_a_file_that_is_gone_is_drift(site: Any, lock: Path) -> None:
    (site.folder / MORE).unlink()
    with pytest.raises(PluginConflictError, match=r"acme-awq: .*\n.*acme-fp8: "):
        compare(site, lock)


def test_what_differs_between_machines_is_not_code(site: Any, lock: Path) -> None:
    record(site, f"{MORE},,", "../bin/acme,,", "__pycache__/acme.cpython-313.pyc,,")
    (site.folder.parent / "bin").mkdir()
    (site.folder.parent / "bin" / "acme").write_text("#!/here/python\n")
    (site.folder / "acme_awq-1.0.dist-info" / "INSTALLER").write_text("uv\n")
    compare(site, lock)


def test_a_hostile_list_reads_nothing_else(site: Any, lock: Path) -> None:
    """Neither what lies elsewhere, nor what has no end."""
    outside = site.folder.parent / "outside"
    os.mkfifo(site.folder / "pipe")
    (site.folder / "endless").symlink_to("/dev/zero")
    names = [str(outside), "../outside", "x/../../outside", "/dev/zero", "pipe", "endless", "\\0"]
    record(site, *(f"{name},," for name in names))
    outside.write_text("one")
    before = code_of("acme-awq")
    outside.write_text("another")
    assert code_of("acme-awq") == before != "unlisted"


@pytest.mark.parametrize("text", [b"\xff,,\n", b'"unclosed,,\n', b",,,,\n", b"\0\n"])
def test_a_damaged_list_is_no_crash(site: Any, lock: Path, text: bytes) -> None:
    (site.folder / "acme_awq-1.0.dist-info" / "RECORD").write_bytes(text)
    with pytest.raises(PluginConflictError, match="acme-awq: "):
        compare(site, lock)


def test_editable_code_is_locked_only_on_demand(site: Any, lock: Path) -> None:
    make_editable(site.folder)
    with pytest.raises(ConfigError, match=r"acme-awq: .*--allow-editable"):
        lock_with_code(site.plugin_manager())
    content = lock_with_code(site.plugin_manager(), allow_editable=True)
    assert content.code["acme-awq"] == "editable"
    lock.write_bytes(msgspec.json.encode(content))
    compare(site, lock)


def test_a_lock_without_code_compares_versions(site: Any, lock: Path) -> None:
    lock.write_bytes(msgspec.json.encode(site.plugin_manager().lock()))
    edit(site.folder)
    compare(site, lock)


@pytest.mark.parametrize("entry", ["LLM", "AsyncLLM"])
def test_a_program_compares_the_code_too(tmp_path: Path, entry: str) -> None:
    """Before anything is loaded: the model does not exist."""
    content = lock_with_code(PluginManager(), allow_editable=True)
    code = {**content.code, "treadle-llama": "0123456789abcdef"}
    lock = tmp_path / "treadle.lock"
    lock.write_bytes(msgspec.json.encode(msgspec.structs.replace(content, code=code)))
    options: Any = {"model": str(tmp_path / "nowhere"), "plugin_lock_file": str(lock)}
    with pytest.raises(PluginConflictError, match="treadle-llama: 0123456789abcdef is locked"):
        if entry == "LLM":
            treadle.LLM(**options)
        else:
            asyncio.run(treadle.AsyncLLM(**options).start())

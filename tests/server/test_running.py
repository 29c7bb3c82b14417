"""The files of running servers: who is listed, and what is left of one that was killed."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from treadle.api.stats import EngineStats
from treadle_server.running import published, running_servers

CHILD = """
import asyncio, os, sys
from pathlib import Path
from types import SimpleNamespace
from treadle_server.running import published, running_servers

async def die():
    async with published(SimpleNamespace(names=["dead"], stats=None), "http://x", Path(sys.argv[2])):
        await asyncio.sleep(0)
        os._exit(0)

if sys.argv[1] == "die":
    asyncio.run(die())
for server in running_servers(Path(sys.argv[2])):
    print(server.pid, *server.models, server.url, server.finished, server.running, server.waiting)
"""


def child(command: str, folder: Path) -> str:
    """Another process: a lock is one against other processes."""
    arguments = [sys.executable, "-c", CHILD, command, str(folder)]
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


def context(**stats: Any) -> Any:
    return SimpleNamespace(names=["a", "b"], stats=EngineStats(**stats))


async def test_a_server_is_listed_as_long_as_it_runs(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "treadle" / "servers"
    state = context(finished={"stop": 3, "abort": 1}, num_running=2, num_waiting=1)
    async with published(state, "http://h:1", folder):
        await asyncio.sleep(0)
        (file,) = folder.iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        line = f"{os.getpid()} a b http://h:1 4 2 1\n"
        assert await asyncio.to_thread(child, "list", folder) == line
    assert list(folder.iterdir()) == [] and child("list", folder) == ""


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    child("die", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert list(running_servers(tmp_path)) == [] and list(tmp_path.iterdir()) == []


async def test_a_folder_that_others_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    async with published(context(), "http://h:1", link):
        assert [p.name for p in tmp_path.iterdir()] == ["link"]
    monkeypatch.setattr("os.getuid", lambda: 4711)
    async with published(context(), "http://h:1", tmp_path / "mine"):
        assert list((tmp_path / "mine").iterdir()) == []
    (tmp_path / "mine" / "1-1.json").write_text("{}")
    assert list(running_servers(tmp_path / "mine")) == []
    assert (tmp_path / "mine" / "1-1.json").exists()


def test_no_folder_is_no_server(tmp_path: Path) -> None:
    assert list(running_servers(tmp_path / "none")) == []

"""``treadle_server``: plugins edit the application."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripted import ScriptedEngine
from serving import serving

from treadle.config import PluginConfig
from treadle.errors import PluginLoadError
from treadle.plugins import PluginManager

PLUGIN = """
from treadle.api.hookspecs import impl

TREADLE = {"server": ["hello"]}


@impl
def treadle_server(app, engine):
    from litestar import get

    @get("/hello")
    async def hello() -> dict[str, str]:
        return {"model": engine.info.model, "served": app.state.context.model}

    @get("/boom")
    async def boom() -> None:
        raise ValueError("/secret 0x7f")

    app.route_handlers += [hello, boom]
"""


def host_of(tmp_path: Path, source: str, **options: object) -> PluginManager:
    file = tmp_path / "hello.py"
    file.write_text(source)
    return PluginManager(PluginConfig(plugin_file=[str(file)], **options))  # type: ignore[arg-type]


async def test_a_plugin_adds_routes_behind_the_key(tmp_path: Path) -> None:
    engine = ScriptedEngine(plugins=host_of(tmp_path, PLUGIN))
    async with serving(engine, api_key=["k"]) as server:
        key = {"authorization": "Bearer k"}
        assert (await server.client.get("/hello")).status_code == 401
        hello = await server.client.get("/hello", headers=key)
        boom = await server.client.get("/boom", headers=key)
    assert hello.json() == {"model": "scripted", "served": "scripted"}
    assert boom.status_code == 500 and "secret" not in boom.text
    assert boom.json()["error"]["code"] == "plugin_failed"


async def test_a_public_route_needs_no_key_unless_it_has_parameters(tmp_path: Path) -> None:
    source = PLUGIN.replace(
        '@get("/hello")', '@get(["/hello", "/of/{name:str}"], opt={"public": True})'
    )
    async with serving(ScriptedEngine(plugins=host_of(tmp_path, source)), api_key=["k"]) as server:
        ask = server.client.get
        statuses = {
            p: (await ask(p)).status_code for p in ("/hello", "/of/x", "/hello/", "/hello/x")
        }
        server.context.draining = True
        assert (await ask("/hello")).status_code == 200
    assert statuses == {"/hello": 200, "/of/x": 401, "/hello/": 401, "/hello/x": 401}


async def test_each_method_of_a_path_is_public_or_not(tmp_path: Path) -> None:
    source = PLUGIN.replace('@get("/hello")', '@get("/hello", opt={"public": True})')
    source = source.replace(
        '@get("/boom")', 'from litestar import post\n    @post(["/hello", "/ready"])'
    )
    async with serving(ScriptedEngine(plugins=host_of(tmp_path, source)), api_key=["k"]) as server:
        assert (await server.client.get("/hello")).status_code == 200
        assert (await server.client.get("/ready")).status_code == 200
        for path in ("/hello", "/ready"):
            assert (await server.client.post(path)).status_code == 401


async def test_the_servers_own_routes_come_through_the_hook_and_can_be_disabled() -> None:
    async with serving() as server:
        assert (await server.post("/tokenize", {"prompt": "a"})).status_code == 200
    plugins = PluginManager(PluginConfig(disable_plugin=["server:tokenize"]))
    async with serving(ScriptedEngine(plugins=plugins)) as server:
        assert (await server.post("/tokenize", {"prompt": "a"})).status_code == 404


async def test_a_hook_that_raises_stops_the_start_and_names_its_owner(tmp_path: Path) -> None:
    source = PLUGIN.replace("    from litestar import get", "    raise KeyError('x')")
    with pytest.raises(PluginLoadError, match=r"hello\.py"):
        async with serving(ScriptedEngine(plugins=host_of(tmp_path, source))):
            pass


PROBE = """
import sys
import treadle_server, treadle_server.plugin
light = [m for m in ("litestar", "uvicorn", "torch") if m in sys.modules]
import treadle_server.run, treadle_server.routes.tokenize, treadle_server.chat.answer, treadle_server.lifecycle
heavy = [m for m in ("torch", "transformers", "numpy") if m in sys.modules]
print(light, heavy)
"""


@pytest.mark.own_python
def test_the_api_process_never_imports_torch() -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60
    )
    assert process.stdout.strip() == "[] []", process.stderr

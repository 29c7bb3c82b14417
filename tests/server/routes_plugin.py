"""A server plugin that answers, generates and misbehaves, as the text of a local file."""

from __future__ import annotations

__all__ = ("HEADER", "PLUGIN")

HEADER = """
import asyncio, ctypes, os, sys, threading, time
from typing import Annotated, Any
import msgspec
from treadle.api import impl
from treadle.api.sampling_params import SamplingParams
from treadle.errors import RequestError

TREADLE = {"server": ["mine"]}
"""
PLUGIN = (
    HEADER
    + """
class Options(msgspec.Struct, frozen=True):
    greeting: str = "hello"

TREADLE_OPTIONS = {"server:mine": Options}

@impl
def treadle_server(app, engine, options):
    from litestar import Request, Response, get, post
    from litestar.exceptions import NotFoundException, NotAuthorizedException
    from litestar.response import Stream

    state = {"opened": False, "left": 0}
    context = app.state.context

    @get("/mine", opt={"public": True})
    async def public(request: Request) -> Response[str]:
        return Response(f"{options['greeting']} {os.getpid()} {state['opened']}", headers={"x-mine": "1"})

    @get("/mine/files/{name:str}")
    async def parameter(name: str, request: Request) -> dict[str, Any]:
        return {"name": name, "query": request.query_params.get("q"), "key": request.headers.get("authorization"), "model": context.model}

    @post("/mine/body", status_code=201)
    async def body(data: dict[str, int]) -> dict[str, int]:
        return {key: value + 1 for key, value in data.items()}

    @get("/mine/tokens")
    async def tokens() -> list[int]:
        return engine.tokenizer.encode("ab", add_special_tokens=False) + [engine.info.max_model_len]

    @get("/mine/threads", sync_to_thread=True)
    def threads() -> str:
        return engine.tokenizer.decode([104, 105])

    @get("/mine/generate")
    async def generate() -> Stream:
        async def texts():
            async for output in engine.generate("ab", SamplingParams(max_tokens=4, output_kind="delta")):
                yield output.outputs[0].text
        return Stream(texts(), media_type="text/plain")

    @get("/mine/prompt")
    async def prompt() -> str:
        async for output in engine.generate([2**21], SamplingParams()):
            pass
        return "generated"

    @get("/mine/large")
    async def large() -> Stream:
        async def pieces():
            for i in range(64):
                state["left"] = i
                yield b"x" * 65536
        return Stream(pieces(), media_type="application/octet-stream")

    @get("/mine/left")
    async def left() -> int:
        return state["left"]

    @get("/mine/fault/{name:str}")
    async def fault(name: str) -> str:
        match name:
            case "raise": raise ValueError("boom")
            case "missing": raise NotFoundException("no such thing")
            case "request": raise RequestError("a is 1; at most 0 is allowed", param="a")
            case "sys.exit": sys.exit(3)
            case "exit": os._exit(3)
            case "segfault": ctypes.string_at(0)
            case "memory": bytearray(5 * 2**30)
            case "hang": time.sleep(1000)
            case "wait": await asyncio.Event().wait()
            case "header": return Response("", headers={"x-a": "b\\r\\nset-cookie: c"})
            case "context": context.observers
            case "plugins": engine.plugins
        return "done"

    async def startup():
        state["opened"] = True

    async def shutdown():
        open(os.environ.get("MINE_CLOSED", os.devnull), "w").write("closed")

    app.on_startup.append(startup)
    app.on_shutdown.append(shutdown)
    app.route_handlers.extend([public, parameter, body, tokens, threads, generate, prompt, large, left, fault])
"""
)

"""What travels between a server and the process of an isolated server plugin, as msgpack.

Many requests are answered at a time, so that the messages of both sides name the request, the
generation or the question that they belong to.
"""

from __future__ import annotations

from typing import Any

import msgspec

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo
from treadle.outputs import RequestOutput
from treadle.processes.failure import Failure

__all__ = (
    "PIECE_BYTES",
    "WINDOW_BYTES",
    "Abort",
    "Ack",
    "AnyFromChild",
    "AnyToChild",
    "Ask",
    "BeginRequest",
    "Cancel",
    "EndOfAnswer",
    "Generate",
    "Head",
    "Output",
    "Piece",
    "Ping",
    "PluginLoaded",
    "Pong",
    "Raised",
    "Refusal",
    "Route",
    "Routes",
    "Scope",
    "Start",
    "StartFailed",
    "Told",
    "child_decoder",
    "server_decoder",
)

WINDOW_BYTES = 512 * 1024
"""Bytes of one answer that may be on the way to a client that does not read them."""
PIECE_BYTES = 128 * 1024
"""Into which the process cuts the body of an answer."""

Headers = list[tuple[bytes, bytes]]


class Route(msgspec.Struct, array_like=True):
    """A path and a method that the plugin answers, with what the router must know of them.

    ``max_body`` are the bytes that its request may have, ``None`` for what the server allows.
    """

    path: str
    method: str
    is_public: bool
    max_body: int | None
    summary: str | None
    description: str | None
    in_schema: bool


class Scope(msgspec.Struct, array_like=True):
    """The parts of an ASGI scope that a handler may read."""

    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    root_path: str
    scheme: str
    http_version: str
    headers: Headers
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    request_id: str


# ------------------------------------------------------------------------- to the process


class Start(msgspec.Struct, array_like=True, tag="start"):
    """Call the hook, with the options as the user wrote them."""

    options: dict[str, Any]
    models: list[str]
    info: EngineInfo
    max_body_bytes: int


class BeginRequest(msgspec.Struct, array_like=True, tag="begin"):
    """Answer a request, whose body has been read."""

    request: int
    scope: Scope
    body: bytes


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """Nobody waits for an answer any more. ``EndOfAnswer`` follows nevertheless."""

    request: int


class Ack(msgspec.Struct, array_like=True, tag="ack"):
    """Bytes of an answer have gone to the client."""

    request: int
    size: int


class Ping(msgspec.Struct, array_like=True, tag="ping"):
    """Ask whether the event loop of the process turns."""

    number: int


class Told(msgspec.Struct, array_like=True, tag="told"):
    """What the tokenizer says: an encoded ``wire.Reply``."""

    question: int
    reply: bytes


class Output(msgspec.Struct, array_like=True, tag="output"):
    """An output of a generation; without one it is over, and ``failure`` says if it failed."""

    generation: int
    output: RequestOutput | None = None
    failure: Failure | None = None


AnyToChild = Start | BeginRequest | Cancel | Ack | Ping | Told | Output

# ----------------------------------------------------------------------- from the process


class PluginLoaded(msgspec.Struct, array_like=True, tag="loaded"):
    """The plugin is imported."""


class StartFailed(msgspec.Struct, array_like=True, tag="failed"):
    """The plugin cannot be used."""

    failure: Failure


class Routes(msgspec.Struct, array_like=True, tag="routes"):
    """What the plugin has added to its application, which answers requests from now on."""

    routes: list[Route]


class Head(msgspec.Struct, array_like=True, tag="head"):
    """The status and the headers of an answer."""

    request: int
    status: int
    headers: Headers


class Piece(msgspec.Struct, array_like=True, tag="piece"):
    """A part of the body of an answer."""

    request: int
    data: bytes


class Refusal(msgspec.Struct, array_like=True, tag="refusal"):
    """The answer is an error, which the server writes."""

    request: int
    status: int
    message: str
    error_type: str | None
    param: str | None
    code: str | None
    headers: dict[str, str]


class Raised(msgspec.Struct, array_like=True, tag="raised"):
    """The plugin failed on a request."""

    request: int
    text: str


class EndOfAnswer(msgspec.Struct, array_like=True, tag="ended"):
    """Nothing more comes for a request; ``is_complete`` if its body has had its end."""

    request: int
    is_complete: bool


class Pong(msgspec.Struct, array_like=True, tag="pong"):
    """The answer to ``Ping``."""

    number: int


class Ask(msgspec.Struct, array_like=True, tag="ask"):
    """A question to the tokenizer, an encoded ``wire.Call``, for whose answer a thread waits."""

    question: int
    call: bytes


class Generate(msgspec.Struct, array_like=True, tag="generate"):
    """Let the engine generate, for a request (0 for none)."""

    generation: int
    request: int
    prompt: Any
    params: SamplingParams


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """Nobody wants the rest of a generation."""

    generation: int


AnyFromChild = (
    PluginLoaded
    | StartFailed
    | Routes
    | Head
    | Piece
    | Refusal
    | Raised
    | EndOfAnswer
    | Pong
    | Ask
    | Generate
    | Abort
)


def child_decoder() -> msgspec.msgpack.Decoder[AnyToChild]:
    """Return what decodes messages in the process of the plugin."""
    return msgspec.msgpack.Decoder(AnyToChild)


def server_decoder() -> msgspec.msgpack.Decoder[AnyFromChild]:
    """Return what decodes messages in the server."""
    return msgspec.msgpack.Decoder(AnyFromChild)

"""From a request of the Responses API to a chat request, which is all that the server runs."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import msgspec

from treadle.errors import RequestError
from treadle_server.errors import APIError
from treadle_server.responses.items import to_messages
from treadle_server.responses.request import InputContent, InputItem, ResponsesRequest, TextFormat
from treadle_server.responses.store import ResponseStore
from treadle_server.responses.tools import ToolTable, to_tool_choice
from treadle_server.wire.chat import ChatRequest
from treadle_server.wire.common import JSONSchema, ResponseFormat, SamplingFields
from treadle_server.wire.messages import SystemMessage

__all__ = ("ResponseCall", "check_metadata", "missing_response", "to_chat")

LOGPROBS = "message.output_text.logprobs"
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
REFUSED = {
    "background": "a response ends with its connection: stream it, or wait for it",
    "conversation": "conversations are not kept: send previous_response_id, or all items",
    "prompt": "prompts are not kept: send instructions and input",
}
Items = list[InputItem]


class ResponseCall(msgspec.Struct, frozen=True, kw_only=True):
    """A request as a chat, with what its answer needs to know. ``items`` is the whole conversation."""

    request: ResponsesRequest
    chat: ChatRequest
    items: Items
    tools: ToolTable
    ignored: list[str]


def to_chat(request: ResponsesRequest, store: ResponseStore, owner: str) -> ResponseCall:
    """Check and translate a request of ``owner``. Raises ``RequestError`` or ``APIError`` (404)."""
    check(request)
    table = ToolTable(request.tools or ())
    items = [*history(request, store, owner), *new_items(request, store, owner)]
    messages, dropped = to_messages(items, table)
    if request.instructions:
        messages.insert(0, SystemMessage(content=request.instructions))
    wants_logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or ())
    shared = {name: getattr(request, name) for name in SamplingFields.__struct_fields__}
    shared.update(stream=True, stream_options=None)
    if request.text is not None and request.text.format is not None:
        shared["response_format"] = response_format(request.text.format)
    chat = ChatRequest(
        **shared,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        tools=table.chat_tools or None,
        tool_choice=to_tool_choice(request.tool_choice, table),
        parallel_tool_calls=request.parallel_tool_calls,
        chat_template_kwargs=request.chat_template_kwargs,
        reasoning=request.reasoning,
    )
    ignored = [f"tools.{kind}" for kind in table.dropped] + [f"input.{kind}" for kind in dropped]
    return ResponseCall(
        request=request, chat=chat, items=items, tools=table, ignored=list(dict.fromkeys(ignored))
    )


def check(request: ResponsesRequest) -> None:
    """Refuse by name what would be dropped otherwise."""
    for name, reason in REFUSED.items():
        if getattr(request, name):
            raise RequestError(f"{name} is not offered: {reason}", param=name)
    if request.truncation not in (None, "disabled"):
        raise RequestError(
            f"truncation is {request.truncation[:64]!r}; only disabled is offered: leave items out "
            "yourself",
            param="truncation",
        )
    if (request.n or 1) != 1:
        raise RequestError(f"n is {request.n}; a response has one output", param="n")
    check_metadata(request.metadata)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raise ``RequestError`` if there is more than is kept."""
    if len(metadata or ()) > MAX_METADATA or any(
        len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE
        for key, value in (metadata or {}).items()
    ):
        raise RequestError(
            f"metadata may have {MAX_METADATA} entries, with keys of {MAX_METADATA_KEY} and texts of "
            f"{MAX_METADATA_VALUE} characters",
            param="metadata",
        )


def history(request: ResponsesRequest, store: ResponseStore, owner: str) -> Items:
    """Return the items of the response that this one continues, its output included."""
    id = request.previous_response_id
    if id is None:
        return []
    previous = store.get(owner, id)
    if previous is None:
        raise missing_response(id, param="previous_response_id", code="previous_response_not_found")
    return stored_items(previous.items) + output_items(previous.response)


def new_items(request: ResponsesRequest, store: ResponseStore, owner: str) -> Items:
    """Return the items of the request itself, with references looked up."""
    if isinstance(request.input, str):
        return [with_id(InputItem(role="user", content=request.input))]
    if not request.input:
        if request.previous_response_id is None:
            raise RequestError("input is missing; send a text or items", param="input")
        return []
    return [with_id(resolved(item, i, store, owner)) for i, item in enumerate(request.input)]


def resolved(item: InputItem, index: int, store: ResponseStore, owner: str) -> InputItem:
    """Return the item that an ``item_reference`` refers to, any other item unchanged."""
    is_bare = item.type is None and item.role is None and item.content is None
    if item.type != "item_reference" and not (is_bare and item.id):
        return item
    entry = store.with_item(owner, item.id or "")
    if entry is not None:
        for output in output_items(entry.response):
            if output.id == item.id:
                return output
    raise APIError(
        404,
        f"input[{index}] refers to the item {item.id!r:.80}, which is not kept here; send the item "
        "itself",
        param=f"input[{index}].id",
        code="item_not_found",
    )


def with_id(item: InputItem) -> InputItem:
    """Give an item the type and the id that lists of items show."""
    item.type = item.type or "message"
    prefix = {"message": "msg", "reasoning": "rs"}.get(item.type, "item")
    item.id = item.id or f"{prefix}_{secrets.token_hex(12)}"
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        item.content = [InputContent(type=kind, text=item.content)]
    return item


def stored_items(data: bytes) -> Items:
    return msgspec.json.decode(data, type=Items)


class _Output(msgspec.Struct):
    output: Items


def output_items(response: bytes) -> Items:
    """Return the output of a stored response as input."""
    return msgspec.json.decode(response, type=_Output).output


def encoded_items(items: Sequence[InputItem]) -> bytes:
    """Return items as they are stored and listed: their empty fields left out."""
    return msgspec.json.encode(items)


def response_format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    if form.schema is None:
        raise RequestError(
            "text.format of type json_schema needs a schema", param="text.format.schema"
        )
    schema = JSONSchema(name=form.name, schema=form.schema, strict=form.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)


def missing_response(id: str, *, param: str | None = None, code: str | None = None) -> APIError:
    return APIError(
        404,
        f"the response {id[:80]!r} is not kept here: it has another key or store: false, was "
        "deleted, or made room for others; send all items instead",
        param=param,
        code=code or "response_not_found",
    )

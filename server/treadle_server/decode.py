"""From the bytes of a body to a typed request, or a 400 that says where the mistake is.

Handlers declare ``data: SomeRequest`` and get it from ``request_body(SomeRequest)``: a body is
checked and decoded once, from bytes to the Struct, and the OpenAPI document follows from the type.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec
from litestar.dto import AbstractDTO

from treadle_server.errors import APIError

if TYPE_CHECKING:
    from litestar._openapi.schema_generation import SchemaCreator
    from litestar.dto.data_structures import DTOFieldDefinition
    from litestar.openapi.spec import Reference, Schema
    from litestar.typing import FieldDefinition

__all__ = (
    "FORBIDDEN_FIELDS",
    "MAX_DEPTH",
    "RequestDecoder",
    "check_depth",
    "check_numbers",
    "request_body",
)

T = TypeVar("T", bound=msgspec.Struct)

MAX_DEPTH = 64
FLATTENINGS = 4
"""Innermost levels that ``bytes.replace`` takes away first: it is much faster than a sum."""
SLICE = 2**16

PROCESSORS = (
    "logits processors are plugins that the operator installs; their arguments are "
    'extra_args: {"name": {"argument": value}}'
)
# Fields of other engines' APIs that hand code, tensors or the inside of the engine to a client.
# They are refused, not ignored: a caller that sends one relies on it.
FORBIDDEN_FIELDS: Mapping[str, str] = {
    "chat_template": "templates are the operator's: start the server with --chat-template",
    "prompt_embeds": "send text or token ids",
    "mm_processor_kwargs": "this server takes text only",
    "media_io_kwargs": "this server takes text only",
    "kv_transfer_params": "the engine moves its cache itself",
    "custom_logit_processor": PROCESSORS,
    "logits_processors": PROCESSORS,
    "vllm_xargs": PROCESSORS,
    "custom_params": "use the named parameters",
    "lora_path": "a client cannot name files of the server",
    "use_beam_search": "beam search is not offered; use n and temperature",
    "suffix": "text is only continued, never filled in before a suffix",
}

EMPTY = frozenset({b"null", b"false", b"{}", b"[]", b'""'})
"""Values of a field that say no more than its absence."""
# Brackets as signed steps of depth: 1 opens, 0xFF (-1) closes.
STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
NON_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
LONG_DIGITS = re.compile(rb"\d{19}")
INTEGER = re.compile(rb"(?<![\d.eE+\-])-?\d{19,}+(?![.eE])")
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1
PRINTABLE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


def check_depth(body: bytes) -> None:
    """Raise unless arrays and objects nest at most ``MAX_DEPTH`` deep.

    Linear in the body, without a Python loop over its bytes: a decoder that recurses must not see
    the body before.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    # Cut out the strings: without escapes, every other piece between quotes is one.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    steps = b"".join(unescaped.split(b'"')[::2]).translate(STEPS, NON_BRACKETS)
    for _ in range(FLATTENINGS):
        steps = steps.replace(b"\x01\xff", b"")
    depth, signed = FLATTENINGS, memoryview(steps).cast("b")
    for start in range(0, len(signed), SLICE):
        piece = signed[start : start + SLICE]
        if max(accumulate(piece, initial=depth)) > MAX_DEPTH:
            raise APIError(
                400,
                f"the body nests deeper than {MAX_DEPTH} levels; flatten it",
                code="json_too_deep",
            )
        depth += sum(piece)


def check_numbers(body: bytes) -> None:
    """Raise, naming the field, if an integer outside of strings does not fit into 64 bits.

    Python has no such bound, but the processes that a request passes through do, and converting
    very long integers takes quadratic time. A body without 19 digits in a row costs one search.
    """
    digits = _huge_integer(body)
    if digits is None:
        return
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        fields = {}
    raise APIError(
        400,
        f"the body has the integer {digits[:24].decode()}{'…' if len(digits) > 24 else ''}; "
        f"{MIN_INTEGER} to {MAX_INTEGER} are allowed",
        param=next((name for name, raw in fields.items() if _huge_integer(bytes(raw))), None),
        code="integer_out_of_range",
    )


def _huge_integer(data: bytes) -> bytes | None:
    """Return the first integer of some JSON that needs more than 64 bits."""
    if LONG_DIGITS.search(data) is None:
        return None
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    for piece in unescaped.split(b'"')[::2]:
        for match in INTEGER.finditer(piece):
            digits = match[0]
            if len(digits) > 20 or not MIN_INTEGER <= int(digits) <= MAX_INTEGER:
                return digits
    return None


class RequestDecoder(Generic[T]):
    """Decodes bodies of one type. ``strict`` refuses unknown fields, otherwise they are named."""

    def __init__(self, kind: type[T], *, strict: bool = False) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._names = msgspec.json.Decoder(dict[str, msgspec.Raw])
        self._known = frozenset(kind.__struct_encode_fields__)
        self._strict = strict

    def decode(self, body: bytes) -> tuple[T, str]:
        """Return the request and the names of ignored fields (joined by commas).

        Raises ``APIError``.
        """
        if not body:
            raise APIError(400, "the body is empty; send a JSON object")
        check_depth(body)
        check_numbers(body)
        try:
            fields = self._names.decode(body)
            ignored = self._unknown(fields) if not self._known.issuperset(fields) else ""
            return self._decoder.decode(body), ignored
        except msgspec.ValidationError as error:
            raise invalid(error) from None
        except msgspec.DecodeError as error:
            raise APIError(
                400, f"the body is not valid JSON: {error}", code="invalid_json"
            ) from None
        except UnicodeDecodeError:
            raise APIError(400, "the body is not valid UTF-8", code="invalid_json") from None
        except RecursionError:
            raise APIError(
                400, "the body nests too deep; flatten it", code="json_too_deep"
            ) from None

    def _unknown(self, fields: Mapping[str, msgspec.Raw]) -> str:
        unknown = [f for f in fields if f not in self._known]
        for name in unknown:
            if name in FORBIDDEN_FIELDS and bytes(fields[name]) not in EMPTY:
                raise APIError(400, f"{name} is not accepted: {FORBIDDEN_FIELDS[name]}", param=name)
        if self._strict:
            field_names = ", ".join(sorted(self._known))
            raise APIError(
                400,
                f"unknown field {unknown[0][:64]!r}; known fields: {field_names}",
                param=unknown[0][:64],
            )
        return ",".join(f for f in unknown[:32] if PRINTABLE.fullmatch(f))


def invalid(error: msgspec.ValidationError) -> APIError:
    """``Expected `int`, got `str` - at `$.max_tokens``` with the parameter taken apart."""
    message, _, path = str(error).replace("`", "").partition(" - at ")
    param = path.removeprefix("key in ").removeprefix("$").removeprefix(".")
    return APIError(400, f"{param}: {message}" if param else message, param=param or None)


def request_body(kind: type[T], *, strict: bool = False) -> type[AbstractDTO[T]]:
    """Return what decodes the ``data`` of a handler, as its ``dto``.

    ``request.state`` keeps the request (``body``) and the ignored fields (``ignored_fields``) for
    whoever answers it.
    """
    return type(
        f"{kind.__name__}Body", (_RequestBody,), {"decoder": RequestDecoder(kind, strict=strict)}
    )


class _RequestBody(AbstractDTO[Any]):
    """Litestar's interface to a ``RequestDecoder``."""

    decoder: ClassVar[RequestDecoder[Any]]

    def decode_bytes(self, value: bytes) -> Any:
        connection = self.asgi_connection
        if connection.headers.get("content-encoding", "identity") != "identity":
            raise APIError(415, "compressed bodies are not accepted; send the JSON as it is")
        state = connection.state
        state.body, state.ignored_fields = self.decoder.decode(value)
        return state.body

    @classmethod
    def create_for_field_definition(cls, *_: Any, **__: Any) -> None:
        """Litestar would make a type for the transfer here; the Struct itself is that type."""

    @classmethod
    def create_openapi_schema(
        cls, field_definition: FieldDefinition, handler_id: str, schema_creator: SchemaCreator
    ) -> Reference | Schema:
        return schema_creator.for_field_definition(field_definition)

    @classmethod
    def generate_field_definitions(
        cls, model_type: type[Any]
    ) -> Generator[DTOFieldDefinition, None, None]:
        yield from ()

    @classmethod
    def detect_nested_field(cls, field_definition: FieldDefinition) -> bool:
        return False

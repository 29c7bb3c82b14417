"""Structural tags: text that is free up to a tag, behind which a format is enforced.

The formats are those of xgrammar (https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html), which vLLM
and SGLang take as well, also in their older form with ``structures`` and ``triggers``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

__all__ = ("Format", "parse_structural_tag", "schemas_in")


class _Format(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True
):
    """What a part of the output must match."""


class AnyText(_Format, frozen=True, tag="any_text"):
    excludes: list[str] = []
    max_chars: Annotated[int, msgspec.Meta(ge=0)] | None = None


class ConstString(_Format, frozen=True, tag="const_string"):
    value: str


class JsonSchema(_Format, frozen=True, tag="json_schema"):
    json_schema: bool | dict[str, Any]
    style: Literal["json"] = "json"


class Grammar(_Format, frozen=True, tag="grammar"):
    grammar: str


class Regex(_Format, frozen=True, tag="regex"):
    pattern: str


class Token(_Format, frozen=True, tag="token"):
    token: int | str


class AnyTokens(_Format, frozen=True, tag="any_tokens"):
    exclude_tokens: list[int | str] = []


class ExcludeToken(_Format, frozen=True, tag="exclude_token"):
    exclude_tokens: list[int | str] = []


class Elements(_Format, frozen=True, tag="sequence"):
    elements: list[Format]


class Options(_Format, frozen=True, tag="or"):
    elements: Annotated[list[Format], msgspec.Meta(min_length=1)]


class Optional(_Format, frozen=True, tag="optional"):
    content: Format


class Plus(_Format, frozen=True, tag="plus"):
    content: Format


class Star(_Format, frozen=True, tag="star"):
    content: Format


class Repeat(_Format, frozen=True, tag="repeat"):
    min: Annotated[int, msgspec.Meta(ge=0)]
    max: Annotated[int, msgspec.Meta(ge=-1)]
    content: Format


class Tag(_Format, frozen=True, tag="tag"):
    begin: str | Token
    content: Format
    end: str | list[str] | Token = ""


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    triggers: Annotated[list[str], msgspec.Meta(min_length=1)]
    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class TokenTriggeredTags(_Format, frozen=True, tag="token_triggered_tags"):
    trigger_tokens: list[int | str]
    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    tags: Annotated[list[Tag], msgspec.Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Format, frozen=True, tag="dispatch"):
    rules: Annotated[list[tuple[str, Format]], msgspec.Meta(min_length=1)]
    loop: bool = True
    excludes: list[str] = []


Format: TypeAlias = (
    AnyText
    | ConstString
    | JsonSchema
    | Grammar
    | Regex
    | Token
    | AnyTokens
    | ExcludeToken
    | Elements
    | Options
    | Optional
    | Plus
    | Star
    | Repeat
    | Tag
    | TriggeredTags
    | TokenTriggeredTags
    | TagsWithSeparator
    | Dispatch
)


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: str
    schema: bool | dict[str, Any]
    end: str


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either ``format``, or the older ``structures`` and ``triggers``."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Format | None = None
    structures: list[_Structure] = []
    triggers: list[str] = []


def parse_structural_tag(source: str) -> Format:
    """Return the format of a structural tag. Raises ``ValueError`` that says where it is wrong."""
    try:
        document = msgspec.json.decode(source, type=_Document)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the structural tag is wrong: {error}") from error
    if document.format is not None:
        if document.structures or document.triggers:
            raise ValueError("a structural tag has a format, or structures and triggers, not both")
        return document.format
    if not document.structures or not document.triggers:
        raise ValueError(
            'a structural tag needs a format, or structures and triggers: {"format": {"type": …}}'
        )
    tags = [
        Tag(begin=item.begin, content=JsonSchema(json_schema=item.schema), end=item.end)
        for item in document.structures
    ]
    return TriggeredTags(triggers=document.triggers, tags=tags)


def schemas_in(part: Format) -> Iterator[str]:
    """Yield the JSON schemas of a format, as texts."""
    if isinstance(part, JsonSchema):
        yield json.dumps(part.json_schema)
    for inner in inner_formats(part):
        yield from schemas_in(inner)


def inner_formats(part: Format) -> Sequence[Format]:
    """Return the formats of which ``part`` consists."""
    match part:
        case Elements() | Options():
            return part.elements
        case Optional() | Plus() | Star() | Repeat() | Tag():
            return [part.content]
        case TriggeredTags() | TokenTriggeredTags() | TagsWithSeparator():
            return part.tags
        case Dispatch():
            return [content for _, content in part.rules]
        case _:
            return []

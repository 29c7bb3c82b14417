"""What an output must match, said with a Python type."""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args, get_origin

import msgspec

from treadle.errors import RequestError

__all__ = ("constraint_of_type",)

OUTLINES = {
    "Regex": ("pattern", "regex"),
    "CFG": ("definition", "grammar"),
    "JsonSchema": ("schema", "json"),
    "Choice": ("items", "choice"),
}
"""Types of outlines: the attribute with what they hold, and our field for it."""


def constraint_of_type(output_type: Any) -> dict[str, Any]:
    """Return fields of ``StructuredOutputsParams`` for a type.

    That may be a JSON schema (``dict``), a pydantic model, whatever msgspec or pydantic know the schema of
    (dataclasses, ``TypedDict``, ``list[int]``), a ``Literal`` or enum, a compiled pattern, or a ``Regex``,
    ``CFG``, ``JsonSchema`` or ``Choice`` of outlines. Raises ``RequestError`` for another value.
    """
    if isinstance(output_type, Mapping):
        return {"json": dict(output_type)}
    if isinstance(output_type, re.Pattern) and isinstance(output_type.pattern, str):
        flags = "".join(name for name in "imsx" if output_type.flags & re.RegexFlag[name.upper()])
        is_said = not flags or output_type.pattern.startswith(f"(?{flags})")
        return {"regex": output_type.pattern if is_said else f"(?{flags}){output_type.pattern}"}
    name = type(output_type).__name__
    if type(output_type).__module__.partition(".")[0] == "outlines" and name in OUTLINES:
        attribute, field = OUTLINES[name]
        value = getattr(output_type, attribute, None)
        return _one_of(list(value or ())) if field == "choice" else {field: value}
    if get_origin(output_type) is Literal:
        return _one_of(list(get_args(output_type)))
    if isinstance(output_type, type) and issubclass(output_type, enum.Enum):
        return _one_of([member.value for member in output_type])
    return {"json": _schema(output_type)}


def _schema(output_type: Any) -> dict[str, Any]:
    if hasattr(output_type, "model_json_schema"):
        return cast("dict[str, Any]", output_type.model_json_schema())
    pydantic = sys.modules.get("pydantic")  # whose types are there only if it is
    try:
        if pydantic is not None and _is_of_pydantic(output_type):
            return cast("dict[str, Any]", pydantic.TypeAdapter(output_type).json_schema())
        return msgspec.json.schema(output_type)
    except Exception as error:  # of pydantic, too
        raise RequestError(
            f"structured_outputs is {output_type!r:.80}, which has no JSON schema: {error}",
            param="structured_outputs",
        ) from error


def _is_of_pydantic(part: Any) -> bool:
    """Whether a type has parts or limits of pydantic, which msgspec does not read or passes over."""
    own = type(part).__module__.startswith(("pydantic", "annotated_types"))
    parts = (*get_args(part), *getattr(part, "__annotations__", {}).values())
    return own or hasattr(part, "__pydantic_core_schema__") or any(map(_is_of_pydantic, parts))


def _one_of(values: list[Any]) -> dict[str, Any]:
    """Return the constraint of one of some values: of texts as they are, of others as JSON."""
    if values and all(isinstance(value, str) for value in values):
        return {"choice": values}
    return {"json": {"enum": values}}

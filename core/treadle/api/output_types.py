"""What an output must match, said with a Python type."""

from __future__ import annotations

import contextlib
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
    if isinstance(output_type, re.Pattern):
        return {"regex": output_type.pattern}
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
        schema: dict[str, Any] = output_type.model_json_schema()
        return schema
    reason: object = "it is a text"
    if not isinstance(output_type, str):
        try:
            return msgspec.json.schema(output_type)
        except (TypeError, RuntimeError) as error:
            reason = error
        pydantic = sys.modules.get("pydantic")
        if (
            pydantic is not None and get_origin(output_type) is not None
        ):  # of lists of models, and so on
            with contextlib.suppress(Exception):
                return cast("dict[str, Any]", pydantic.TypeAdapter(output_type).json_schema())
    raise RequestError(
        f"structured_outputs is {output_type!r:.80}, which has no JSON schema: {reason}",
        param="structured_outputs",
    )


def _one_of(values: list[Any]) -> dict[str, Any]:
    """Return the constraint of one of some values: of texts as they are, of others as JSON."""
    if values and all(isinstance(value, str) for value in values):
        return {"choice": values}
    return {"json": {"enum": values}}

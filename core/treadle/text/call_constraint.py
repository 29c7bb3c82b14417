"""What an output may be if the model may call a tool but need not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.api.parsers import Tool
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.errors import RequestError
from treadle.text.parser_plugins import ParserPlugins
from treadle.text.tool_choice import to_structured_outputs

__all__ = ("constraint_with_calls",)

FREE_TEXT = "\nfree_text:"
"""A rule in each grammar of text with calls in it. A parser that does not know the choice ``auto`` may
answer as for a forced call."""


async def constraint_with_calls(
    tools: Sequence[Tool],
    answer: StructuredOutputsParams | None,
    parsers: ParserPlugins,
    backend: str | None,
) -> StructuredOutputsParams | None:
    """Return the constraint of an output that calls ``tools``, or else obeys ``answer``.

    Without ``answer``, text is free, and calls obey their schemas if a tool is ``strict`` and the parser has a
    grammar of such text. Raises ``RequestError`` if the parser has no grammar of its calls.
    """
    if answer is None:
        if not any(tool.strict for tool in tools) or not parsers.plugins.keys("structured_output"):
            return None
        try:
            calls = to_structured_outputs(await parsers.forced_call(tools, "auto"))
        except RequestError as error:
            if error.param == "tools":  # a tool that cannot be called by its schema
                raise
            return None
        is_free = FREE_TEXT in (calls.grammar or "")
        return msgspec.structs.replace(calls, backend=backend) if is_free else None
    if answer.json is None and not answer.json_object:
        return answer
    spec = await parsers.forced_call(tools, "required")
    forms = [_format(to_structured_outputs(spec)), _format(answer)]
    if heads := spec.options.get("heads"):
        pairs = zip(({"type": "grammar", "grammar": head} for head in heads), forms, strict=True)
        forms = [{"type": "sequence", "elements": pair} for pair in pairs]
        answer = msgspec.structs.replace(answer, reasoning="")
    tag = {"format": {"type": "or", "elements": forms}}
    return msgspec.structs.replace(answer, json=None, json_object=None, structural_tag=tag)


def _format(constraint: StructuredOutputsParams) -> dict[str, Any]:
    """Return a constraint as a part of a structural tag."""
    if constraint.grammar is not None:
        return {"type": "grammar", "grammar": constraint.grammar}
    schema = {"type": "object"} if constraint.json is None else constraint.json
    document = json.loads(schema) if isinstance(schema, str) else schema
    return {"type": "json_schema", "json_schema": document}

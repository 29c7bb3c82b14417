"""Tools together with a response format: the output is a call, or an answer in the format.

A constraint holds for a whole output. That of the format alone would leave the model no way to
call a tool, so both are joined into one Lark grammar.
"""

from __future__ import annotations

import json

import msgspec

from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.text.chat import Conversation
from treadle.text.parser_plugins import ParserPlugins
from treadle.text.tool_choice import parse_tools

__all__ = ("with_calls",)

START = "start:"


async def with_calls(
    conversation: Conversation, params: SamplingParams, plugins: ParserPlugins
) -> SamplingParams:
    """Return ``params`` with a constraint that lets the model call a tool, if it may but need not.

    Raises ``RequestError`` if the parser has no grammar of its calls.
    """
    answer = params.structured_outputs
    is_optional = bool(conversation.tools) and conversation.tool_choice in (None, "auto")
    if not is_optional or answer is None or plugins.tool_call_parser is None:
        return params
    if answer.json is None and not answer.json_object:
        return params
    calls = await plugins.forced_call(parse_tools(conversation.tools), "required")
    joined = msgspec.structs.replace(
        answer, json=None, json_object=None, grammar=joined_grammar(calls, answer)
    )
    return params.replace(structured_outputs=joined)


def joined_grammar(calls: StructuredOutputsParams, answer: StructuredOutputsParams) -> str:
    """Return a Lark grammar of either; each schema is a document of its own."""
    lines = [f"{START} calls_of_tools | answer_in_format"]
    if calls.grammar is not None:
        lines.append(f"calls_of_tools:{calls.grammar.removeprefix(START)}")
    else:
        lines.append(f"calls_of_tools: {json_rule(calls)}")
    return "\n".join([*lines, f"answer_in_format: {json_rule(answer)}"])


def json_rule(constraint: StructuredOutputsParams) -> str:
    schema = constraint.json if constraint.json is not None else {"type": "object"}
    document = json.loads(schema) if isinstance(schema, str) else schema
    return f"%json {json.dumps(document)}"

"""What an output may be if the model may call a tool but need not.

With a response format: a call, or an answer in the format. A constraint holds for a whole output,
and that of the format alone would leave the model no way to call a tool, so both are joined into
one Lark grammar. With tools that are ``strict``: text in which every call obeys the schemas.
"""

from __future__ import annotations

import json

import msgspec

from treadle.api.sampling_params import SamplingParams, StructuredOutputsParams
from treadle.errors import RequestError
from treadle.text.chat import Conversation
from treadle.text.parser_plugins import ParserPlugins
from treadle.text.tool_choice import parse_tools

__all__ = ("with_calls",)

START = "start:"
FREE_TEXT = "free_text:"


async def with_calls(
    conversation: Conversation, params: SamplingParams, plugins: ParserPlugins
) -> SamplingParams:
    """Return ``params`` with a constraint that lets the model call a tool, if it may but need not.

    Raises ``RequestError`` if the parser has no grammar of its calls.
    """
    answer = params.structured_outputs
    is_optional = bool(conversation.tools) and conversation.tool_choice in (None, "auto")
    if not is_optional or plugins.tool_call_parser is None:
        return params
    if answer is None:
        strict = await strict_calls(conversation, plugins)
        return params if strict is None else params.replace(structured_outputs=strict)
    if answer.json is None and not answer.json_object:
        return params
    calls = await plugins.forced_call(parse_tools(conversation.tools), "required")
    joined = msgspec.structs.replace(
        answer, json=None, json_object=None, grammar=joined_grammar(calls, answer)
    )
    return params.replace(structured_outputs=joined)


async def strict_calls(
    conversation: Conversation, plugins: ParserPlugins
) -> StructuredOutputsParams | None:
    """Return the constraint of text with calls in it, if a tool is strict and the parser has one.

    Its grammar names the text between the calls: a parser that does not know the choice ``auto``
    may answer as for a forced call.
    """
    tools = parse_tools(conversation.tools)
    if not any(tool.strict for tool in tools) or not plugins.plugins.keys("structured_output"):
        return None
    try:
        calls = await plugins.forced_call(tools, "auto")
    except RequestError:
        return None
    if f"\n{FREE_TEXT}" not in (calls.grammar or ""):
        return None
    return msgspec.structs.replace(calls, backend=conversation.structured_output_backend)


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

"""The grammars of calls: a JSON schema's values as Python would write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from treadle.api.types import GrammarSpec, Tokenizer, Tool
from treadle.errors import RequestError
from treadle_parsing_kit.tool_choice import (
    arguments_schema,
    lark_string,
    names_one_tool,
    names_pattern,
    tag_rule,
    untagged_text_rules,
    writable_tools,
)
from treadle_pythonic.values import ANY_VALUE, Unenforceable, ValueRules
from treadle_structured_output_kit.drafts import modernize

__all__ = ("python_grammar", "text_with_lists")

ANY_KEY = "/[A-Za-z_][A-Za-z0-9_]*=/"
ANY_MEMBERS = f'({ANY_KEY} value (", " {ANY_KEY} value)*)?'


def python_grammar(tools: Sequence[Tool], choice: str | Mapping[str, Any]) -> GrammarSpec:
    """``[f(a=1)]`` of the tools that ``choice`` allows.

    Raises ``RequestError`` for a tool or an argument that Python could not name, and for a tool that is
    ``strict`` whose schema the rules cannot hold.
    """
    selected = writable_tools(tools, choice, _can_write)
    calls = " | ".join(f"call_{i}" for i in range(len(selected)))
    repetition = "" if names_one_tool(choice) else ' (", " call)*'
    lines = [f'start: "[" call{repetition} "]"', f"call: {calls}"]
    for i, tool in enumerate(selected):
        _add_call(lines, i, tool)
    return GrammarSpec("ebnf", "\n".join(lines) + ANY_VALUE)


def text_with_lists(
    tools: Sequence[Tool], tokenizer: Tokenizer, tag: str, closing: str
) -> GrammarSpec | None:
    """Text in which a list that begins with a call of a tool is one of calls. ``None`` without such tools.

    The arguments of tools that are not ``strict`` may be any. Raises as ``python_grammar`` does.
    """
    tools = writable_tools(tools, "auto", _can_write)
    if not tools:
        return None
    rules = untagged_text_rules(
        rf"\[[ \t\r\n]*{names_pattern(tools)}\(",
        [(f"[{tool.name}(", f'members_{i} ")" (", " call)* "]"') for i, tool in enumerate(tools)],
        tags=[tag],
        closing=tag_rule(closing, tokenizer),
        tokenizer=tokenizer,
    )
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
    for i, tool in enumerate(tools):
        _add_call(rules, i, tool, is_free=not tool.strict)
    return GrammarSpec("ebnf", "\n".join(rules) + ANY_VALUE)


def _add_call(lines: list[str], i: int, tool: Tool, *, is_free: bool = False) -> None:
    members = ANY_MEMBERS if is_free else _members(lines, tool)
    lines += [
        f"members_{i}: {members}",
        f'call_{i}: {lark_string(tool.name + "(")} members_{i} ")"',
    ]


def _members(lines: list[str], tool: Tool) -> str:
    def key(name: str) -> str:
        if name and not name.isidentifier():
            raise RequestError(
                f"the function {tool.name[:64]!r} has an argument {name[:64]!r}, which cannot be written in "
                "the format of this model's calls; letters, digits and _ are possible",
                param="tools",
            )
        return lark_string(f"{name}=") if name else ANY_KEY

    schema = arguments_schema(tool)
    try:
        return ValueRules(lines, modernize(schema), strict=tool.strict).arguments(key)
    except RequestError:
        raise
    except Unenforceable as error:
        raise RequestError(
            f"the parameters of the strict function {tool.name[:64]!r} have {error}, which cannot be "
            "enforced in the format of this model's calls; leave it out, or send strict false",
            param="tools",
        ) from None
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise RequestError(
            f"the parameters of the function {tool.name[:64]!r} are no JSON schema: a keyword has a value of "
            "another type than it may have",
            param="tools",
        ) from error


def _can_write(tool: Tool) -> bool:
    return all(part.replace("-", "_").isidentifier() for part in tool.name.split("."))

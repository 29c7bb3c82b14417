"""The parts of the documentation that are written from the code.

A page holds ``<!-- generated: NAME -->`` … ``<!-- end generated -->``; ``tools/sync.py`` puts the
text of the function NAME between them, so that pages read well where they lie and cannot be stale.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_type_hints

import catalogue
import command_line
import contracts
import foreign_names
import http_api
import kernel_pages
import kind_pages
import msgspec
import python_api
import schema_keywords
from msgspec.inspect import (
    BoolType,
    DictType,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    Metadata,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    type_info,
)
from repository import hooks

import treadle.errors
from treadle.api import sampling_params as params
from treadle.config import EngineConfig, config_sections
from treadle.plugins import installed_kinds
from treadle_server.config import ServerConfig

__all__ = ("BLOCKS", "filled")

MARK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end generated -->)", re.DOTALL)

SAMPLING = {
    "n": "How many outputs to generate for the prompt; they share the pages of the prompt.",
    "max_tokens": "Longest output in tokens; `None`: as much as the model's length allows.",
    "min_tokens": "No end of sequence and no stop id or string ends the output before this many tokens.",
    "temperature": "Divides the logits; 0 takes the likeliest token.",
    "top_p": "Keep the fewest tokens whose probabilities add up to this; 1 is off.",
    "top_k": "Keep this many tokens; -1 and 0 are off.",
    "min_p": "Keep tokens at least this probable, relative to the likeliest; 0 is off.",
    "repetition_penalty": "Divides (multiplies, if negative) logits of tokens in prompt or output; 1 is off.",
    "presence_penalty": "Subtracted once from the logit of every token of the output.",
    "frequency_penalty": "Subtracted from a token's logit once for each time it is in the output.",
    "seed": "Same seed, same tokens, whatever else is in the batch; `None`: the engine chooses.",
    "stop": "Texts that end the output.",
    "stop_token_ids": "Token ids that end the output, beside the model's end of sequence.",
    "include_stop_str_in_output": "Keep the stop text at the end of the output.",
    "ignore_eos": "Go on after the end of sequence.",
    "logit_bias": "Added to the logits of these ids.",
    "allowed_token_ids": "Sample from these ids only.",
    "bad_words": "Texts that are not generated.",
    "logprobs": "Return the log probability of each sampled token and of this many likeliest ones.",
    "prompt_logprobs": "The same for the tokens of the prompt, the first excepted.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Put spaces between special tokens in the text.",
    "detokenize": "Turn ids into text; `False` returns ids only.",
    "truncate_prompt_tokens": "Keep this many tokens of the prompt, the last ones.",
    "priority": "Lower is served first, under the policy `priority`.",
    "cache_salt": "Prompts share cached pages only with prompts of the same salt.",
    "structured_outputs": "What the output must match: see below.",
    "extra_args": "Arguments of logits processors and of the scheduling policy, by the plugin's name.",
    "thinking_token_budget": "Tokens after which the reasoning of a chat is ended.",
    "output_kind": "What a streamed output holds: all so far, only what is new, or nothing until the end.",
}

STRUCTURED_OUTPUTS = {
    "json": "A JSON schema.",
    "json_object": "Any JSON object.",
    "regex": "A regular expression that the whole output matches.",
    "choice": "One of these texts.",
    "grammar": "A grammar in the dialect of the backend.",
    "structural_tag": "Free text, and what must follow the tags in it: see below.",
    "whitespace_pattern": "Regular expression of the blanks allowed in JSON.",
    "disable_any_whitespace": "No blanks in JSON.",
    "disable_additional_properties": "Objects with named properties have no others, unless the schema says.",
    "strict": "`False` accepts schemas that no backend enforces as a whole, and says what is not enforced.",
    "backend": "The `structured_output` plugin to use; default: the first of the option `structured_output_backends` that can.",
    "reasoning": "The reasoning parser whose reasoning comes before the output that must match.",
    "may_open_reasoning": "Whether the model may begin that reasoning itself; if not, only the prompt can have begun it.",
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = tuple(head)
    lines = [head, tuple("---" for _ in head), *rows]
    cells = ((cell.replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


# ------------------------------------------------------------------------------- the plugins


def kinds() -> str:
    """One row for each kind of plugin."""
    rows = (
        (
            f"[`treadle.{k.name}`](plugins/{k.name}.md)",
            k.key,
            k.mode,
            f"[`{k.hook}`](#{k.hook})",
            f"`{k.owner}`",
            f"{k.budget:g} s",
        )
        for k in installed_kinds().values()
    )
    return table(("Entry-point group", "Key", "Mode", "Hook", "Called by", "Budget"), rows)


def hook_reference() -> str:
    """Every hook with its exact signature."""
    return "\n".join(_hooks())


def _hooks() -> Iterator[str]:
    groups = {kind.hook: kind for kind in installed_kinds().values()}
    for hook in hooks():
        yield f"### {hook.name}\n"
        yield f"`{hook.name}({', '.join(hook.arguments)})`\n"
        yield f"{one_line(hook.doc)}\n"
        if kind := groups.get(hook.name):
            yield f"Group `{kind.group}`, key: {kind.key}, mode *{kind.mode}*.\n"
        yield f"```text\n{hook.signature}\n```\n"


def one_line(doc: str) -> str:
    return " ".join(doc.replace("``", "`").split())


# ------------------------------------------------------------------------------- the options


def options() -> str:
    """Every option of the engine, by section."""
    sections = []
    for name, struct in config_sections(EngineConfig):
        sections.append(f"## {name}\n\n{one_line(struct.__doc__ or '')}\n\n{option_table(struct)}")
    return "\n".join(sections)


def server() -> str:
    """Every option of the server."""
    return option_table(ServerConfig)


def option_table(struct: type[msgspec.Struct]) -> str:
    """The fields of a Struct whose descriptions are in ``Meta``."""
    described = type_info(struct)
    if not isinstance(described, StructType):
        raise TypeError(f"{struct} is not a Struct")
    rows = ((f"`{f.name}`", kind(f.type), default(f), about(f.type)) for f in described.fields)
    return table(("Option", "Values", "Default", ""), rows)


def kind(t: Type) -> str:
    """The values of an option, in words."""
    match t:
        case Metadata():
            return kind(t.type)
        case UnionType():
            return " or ".join(
                kind(option) for option in t.types if not isinstance(option, NoneType)
            )
        case LiteralType():
            return ", ".join(f"`{value}`" for value in t.values)
        case BoolType():
            return "`true`, `false`"
        case IntType():
            return f"whole number{limits(t)}"
        case FloatType():
            return f"number{limits(t)}"
        case StrType():
            return "text"
        case ListType():
            return f"list of {kind(t.item_type)}"
        case DictType():
            return "JSON object"
    raise TypeError(f"documents.py has no words for {t}")


def limits(t: IntType | FloatType) -> str:
    signs = {">": t.gt, "≥": t.ge, "<": t.lt, "≤": t.le}
    bounds = [f"{sign} {value:g}" for sign, value in signs.items() if value is not None]
    return " " + ", ".join(bounds) if bounds else ""


def default(field: msgspec.inspect.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        value = field.default
    return (
        ""
        if value is None
        else f"`{value}`".replace("`True`", "`true`").replace("`False`", "`false`")
    )


def about(t: Type) -> str:
    """The description in ``Meta``, which may stand on an arm of a union."""
    if isinstance(t, Metadata):
        return str((t.extra_json_schema or {}).get("description", "")) or about(t.type)
    return ""


# -------------------------------------------------------------------- the sampling parameters


def sampling() -> str:
    """Every sampling parameter with its bounds."""
    return parameters(params.SamplingParams, SAMPLING)


def structured_outputs() -> str:
    """The fields of ``StructuredOutputsParams``."""
    return parameters(params.StructuredOutputsParams, STRUCTURED_OUTPUTS)


def parameters(struct: type[msgspec.Struct], meaning: dict[str, str]) -> str:
    hints, defaults = get_type_hints(struct), msgspec.structs.fields(struct)
    if unknown := set(struct.__struct_fields__) ^ set(meaning):
        raise ValueError(f"say in tools/documents.py what these mean: {', '.join(sorted(unknown))}")
    described = struct is params.SamplingParams
    rows = []
    for field in defaults:
        value = None if field.default is msgspec.NODEFAULT else field.default
        row = (f"`{field.name}`", f"`{shown(hints[field.name])}`", f"`{value!r}`")
        rows.append((*row, *([bounds(field.name)] if described else []), meaning[field.name]))
    bounds_column = ("Bounds",) if described else ()
    return table(("Parameter", "Type", "Default", *bounds_column, ""), rows)


def shown(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return re.sub(r"\b(?:typing|treadle\.sampling\.params)\.", "", text).replace("'", '"')


def bounds(name: str) -> str:
    counts = {
        "stop": f"≤ {params.MAX_STOP_STRINGS} texts of ≤ {params.MAX_STOP_CHARS} characters",
        "stop_token_ids": f"≤ {params.MAX_STOP_IDS} ids",
        "logit_bias": f"≤ {params.MAX_BIAS} ids; -100 … 100",
        "bad_words": f"≤ {params.MAX_BAD_WORDS} texts",
        "cache_salt": f"≤ {params.MAX_SALT_CHARS} characters",
    }
    if name not in params.BOUNDS:
        return counts.get(name, "")
    low, high = params.BOUNDS[name]
    return f"{'> ' if name in params.OPEN_BELOW else ''}{number(low)} … {number(high)}"


def number(value: float) -> str:
    powers = {2**31 - 1: "2³¹ - 1", -(2**31): "-2³¹", 2**63 - 1: "2⁶³ - 1", -(2**63): "-2⁶³"}
    return powers.get(int(value), f"{value:g}")


# --------------------------------------------------------------------------------- the errors


def errors() -> str:
    """The tree that the module of the errors draws."""
    tree = (
        inspect.cleandoc(treadle.errors.__doc__ or "").split("::\n", 1)[1].split("\n\nA message")[0]
    )
    return f"```text\n{inspect.cleandoc(tree)}\n```\n"


BLOCKS: dict[str, Callable[[], str]] = (
    {
        block.__name__: block
        for block in (
            kinds,
            hook_reference,
            options,
            server,
            sampling,
            structured_outputs,
            errors,
        )
    }
    | {"http": http_api.reference, "cli": command_line.reference, "python": python_api.reference}
    | {"layers": python_api.layers}
    | contracts.BLOCKS
    | catalogue.BLOCKS
    | foreign_names.BLOCKS
    | kind_pages.BLOCKS
    | kernel_pages.BLOCKS
    | schema_keywords.BLOCKS
)


def filled(page: str) -> str:
    """The page with every generated block written anew. Raises ``KeyError`` for an unknown one."""
    return MARK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}{m[3]}", page)

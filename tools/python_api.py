"""The public names of ``treadle`` and of the kit of layers, from signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec

import treadle
from treadle.api.contracts import is_protocol

__all__ = ("layers", "markdown", "reference")

FIRST = (
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "StructuredOutputsParams",
    "RequestOutput",
    "CompletionOutput",
)
ELSEWHERE = {
    "SamplingParams": "Its fields are in [Sampling parameters](sampling.md).",
    "StructuredOutputsParams": "Its fields are in [Structured output](structured-output.md#fields).",
    "EngineConfig": "Its sections and their fields are in [Options](options.md).",
    "TreadleError": "All errors are in [Errors](errors.md).",
}


def reference() -> str:
    """Every class that ``import treadle`` offers: what it is, its fields, its methods."""
    names = [n for n in treadle.__all__ if inspect.isclass(getattr(treadle, n))]
    ordered = sorted(names, key=lambda n: (FIRST.index(n) if n in FIRST else len(FIRST), n))
    return "\n".join(line for name in ordered for line in _class(name, getattr(treadle, name)))


def layers() -> str:
    """Every name that ``import treadle_layers_kit`` offers: the classes first, then the functions."""
    import treadle_layers_kit as kit

    values = {name: getattr(kit, name) for name in kit.__all__}
    classes = [n for n, value in values.items() if inspect.isclass(value)]
    functions = [n for n, value in values.items() if inspect.isfunction(value)]
    sections = [line for name in classes for line in _class(name, values[name], made=True)]
    for name in functions:
        call = values[name]
        shown = _signature(name, call, skip=0)
        sections.append(f"## {name}\n\n```text\n{shown}\n```\n\n{markdown(call.__doc__ or '')}\n")
    rest = ", ".join(f"`{n}`" for n in values if n not in {*classes, *functions})
    return "\n".join(sections) + (f"\nAliases of types: {rest}.\n" if rest else "")


def _class(name: str, kind: type, *, made: bool = False) -> Iterator[str]:
    """The section of a class; ``made`` shows how one is made even if that is not documented."""
    yield f"## {name}\n\n{markdown(kind.__doc__ or '')}\n"
    if name in ELSEWHERE:
        yield f"{ELSEWHERE[name]}\n"
    elif rows := list(_fields(kind)):
        yield "| Field | Type | |\n| --- | --- | --- |\n" + "".join(rows)
    if made and inspect.isfunction(vars(kind).get("__init__")) and not is_protocol(kind):
        yield f"```text\n{_signature(name, vars(kind)['__init__'])}\n```\n"
    members = [(n, m) for n, m in vars(kind).items() if n == "__init__" or not n.startswith("_")]
    for member, value in members:
        function: Any = value.fget if isinstance(value, property) else value
        call = inspect.unwrap(function)
        if not inspect.isfunction(call) or not (call.__doc__ or "").strip():
            continue
        title = name if member == "__init__" else f"{name}.{member}"
        shown = title if isinstance(value, property) else _signature(title, call)
        heading = f"{name}()" if member == "__init__" else title
        yield f"### {heading}\n\n```text\n{shown}\n```\n\n{markdown(call.__doc__ or '')}\n"


def _fields(cls: type) -> Iterator[str]:
    if not (issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls)):
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for node, next_node in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ""
            if isinstance(next_node, ast.Expr) and isinstance(next_node.value, ast.Constant):
                text = " ".join(markdown(str(next_node.value.value)).split())
            type_ = ast.unparse(node.annotation).replace("|", "\\|")
            yield f"| `{node.target.id}` | `{type_}` | {text} |\n"


def _signature(title: str, call: Any, skip: int = 1) -> str:
    """One line, or one for each argument if that is too long; without the first ``skip``, ``self``."""
    signature = inspect.signature(call)
    arguments: list[str] = []
    for parameter in list(signature.parameters.values())[skip:]:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in "".join(arguments):
            arguments.append("*")
        stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        text = f"{stars}{parameter.name}: {parameter.annotation}"
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        arguments.append(text + default)
    arrow = "" if call.__name__ == "__init__" else f" -> {signature.return_annotation}"
    title = f"await {title}" if inspect.iscoroutinefunction(call) else title
    line = f"{title}({', '.join(arguments)}){arrow}"
    if len(line) <= 96:
        return line
    return f"{title}(\n" + "".join(f"    {a},\n" for a in arguments) + f"){arrow}"


def markdown(doc: str) -> str:
    """A docstring as Markdown: literal blocks are fenced, double backticks become single ones."""
    text = re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(doc))
    text = re.sub(
        r"^(.*)::\n\n((?:[ ]{4}.*\n?|\n)+)",
        lambda m: (
            f"{m[1].rstrip()}{':' if m[1].strip() else ''}\n\n```py\n"
            f"{textwrap.dedent(m[2]).strip()}\n```\n\n"
        ),
        text,
        flags=re.MULTILINE,
    )
    return text.strip()

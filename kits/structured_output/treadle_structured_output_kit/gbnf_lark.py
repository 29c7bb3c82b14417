"""Grammars in GBNF as Lark in the dialect of llguidance.

Its lexer takes the longest text of each terminal. What is regular as a whole is therefore one terminal, and in the
other grammars each rule that is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treadle_structured_output_kit.free_text import (
    Branch,
    any_of,
    between_slashes,
    free_text,
    quoted,
    spelled,
)
from treadle_structured_output_kit.gbnf import (
    Characters,
    Choice,
    Macro,
    Node,
    Reference,
    Repeat,
    Row,
    Text,
    nodes_in,
    parse_gbnf,
)

__all__ = ("gbnf_to_lark",)

REGULAR = ("Regex", "Substring")
"""Macros that may be part of a terminal."""
FLAGS = frozenset("ims")
MAX_DEPTH = 16
SURROGATES = (0xD800, 0xDFFF)


def gbnf_to_lark(source: str) -> str:
    """Return the same grammar in Lark. Raises ``ValueError`` that says what is wrong, or not supported."""
    rules = parse_gbnf(source)
    regular = _regular(rules)
    names = {
        name: f"RULE_{index}" if name in regular else f"rule_{index}"
        for index, name in enumerate(rules)
    }
    writer = _Writer(names, rules)
    lines = [f"start: {names['root']}"]
    lines += [f"{names[name]}: {writer.body(body)}" for name, body in rules.items()]
    return "\n".join([*lines, *writer.lines])


def _regular(rules: Mapping[str, Node]) -> set[str]:
    """Return the rules that are regular expressions: those that do not come back to themselves."""
    regular: set[str] = set()
    while True:
        more = {
            name
            for name, body in rules.items()
            if name not in regular
            and all(
                (not isinstance(node, Reference) or node.name in regular)
                and not (isinstance(node, Macro) and node.name not in REGULAR)
                for node in nodes_in(body)
            )
        }
        if not more:
            return regular
        regular |= more


class _Writer:
    def __init__(self, names: Mapping[str, str], rules: Mapping[str, Node]) -> None:
        self._names, self._rules = names, rules
        self.lines: list[str] = []

    def body(self, node: Node, *, is_last: bool = True) -> str:
        """Return the expression of a node. ``is_last`` says whether nothing follows in its rule."""
        match node:
            case Text(value):
                return quoted(value)
            case Characters():
                return f"/{_class(node)}/"
            case Row(parts):
                return self._row(parts, is_last=is_last)
            case Choice(options):
                return any_of(self.body(option, is_last=is_last) for option in options)
            case Repeat(most=0):
                return quoted("")
            case Repeat(part, least, most):
                counts = f"{{{least},{'' if most is None else most}}}"
                return f"{self._atom(part, is_last=False)}{counts}"
        if not is_last and self._dispatch(node) is not None:
            raise ValueError("TagDispatch is followed by something else than texts")
        match node:
            case Reference(name):
                return self._names[name]
            case Macro("TagDispatch"):
                return self._free(node, ())
            case Macro("TokenTagDispatch"):
                return self._tokens(node)
        return _macro(node)

    def _row(self, parts: Sequence[Node], *, is_last: bool) -> str:
        found, index = [], 0
        while index < len(parts):
            part, following = parts[index], parts[index + 1] if index + 1 < len(parts) else None
            dispatch = self._dispatch(part)
            ends = () if following is None or dispatch is None else self._texts(following)
            if dispatch is not None and ends:
                found.append(self._free(dispatch, ends))
                index += 2
                continue
            found.append(self._atom(part, is_last=is_last and following is None))
            index += 1
        return " ".join(found) if found else quoted("")

    def _texts(self, node: Node, depth: int = 0) -> tuple[str, ...]:
        """Return the texts one of which a node is, none if it is something else."""
        match node:
            case Text(value) if value:
                return (value,)
            case Reference(name) if depth < MAX_DEPTH:
                return self._texts(self._rules[name], depth + 1)
            case Choice(options):
                found = [self._texts(option, depth) for option in options]
                return tuple(text for texts in found for text in texts) if all(found) else ()
        return ()

    def _dispatch(self, node: Node) -> Macro | None:
        """Return the ``TagDispatch`` that a node is, also by its rule."""
        seen = set()
        while isinstance(node, Reference) and node.name not in seen:
            seen.add(node.name)
            node = self._rules[node.name]
        return node if isinstance(node, Macro) and node.name == "TagDispatch" else None

    def _branches(self, macro: Macro, kind: type) -> list[Branch]:
        branches = []
        for pair in macro.arguments:
            match pair:
                case (str() | int() as begin, Reference(name)) if (
                    isinstance(begin, kind) and begin != ""
                ):
                    if name not in self._names:
                        raise ValueError(f"{macro.name} refers to {name}, which is no rule")
                    branches.append(Branch((begin,), self._names[name]))
                case _:
                    raise ValueError(f"{macro.name} takes pairs of a {kind.__name__} and a rule")
        return branches

    def _free(self, macro: Macro, ends: Sequence[str]) -> str:
        options = dict(macro.options)
        excludes = _listed(options.get("excludes", ()), str, macro.name)
        body = free_text(
            self._branches(macro, str),
            [(end,) for end in ends],
            # What ends the text may stand there, once.
            [text for text in excludes if not any(end.startswith(text) for end in ends)],
            lexeme=self._lexeme,
            once=options.get("loop_after_dispatch") is False,
        )
        return f"({body})"

    def _tokens(self, macro: Macro) -> str:
        """Return any tokens but some, and rules behind others: a token has no beginning in common."""
        options, branches = dict(macro.options), self._branches(macro, int)
        excluded = _listed(options.get("excludes", ()), int, macro.name)
        stops = [*excluded, *(int(branch.literal[0]) for branch in branches)]
        other = f"<[^{','.join(map(str, stops))}]>" if stops else "<[*]>"
        steps = any_of(f"{other}* {spelled(b.literal)} {b.rest}" for b in branches)
        if not branches:
            return f"{other}*"
        if options.get("loop_after_dispatch") is False:
            return f"({steps} | {other}*)"
        return f"({steps}* {other}*)"

    def _lexeme(self, body: str) -> str:
        name = f"TEXT_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _atom(self, node: Node, *, is_last: bool) -> str:
        text = self.body(node, is_last=is_last)
        is_atom = isinstance(node, (Text, Characters, Reference))
        return text if is_atom else f"({text})"


def _listed(values: Any, kind: type, name: str) -> list[Any]:
    """Return the values of a tuple, which may be a value alone."""
    found = list(values) if isinstance(values, tuple) else [values]
    if not all(isinstance(value, kind) for value in found):
        raise ValueError(f"excludes of {name} has something else than values of {kind.__name__}")
    return found


def _class(node: Characters) -> str:
    """Return a class of characters as a part of a pattern."""
    if node.is_negated and not node.ranges:
        return r"(?s:.)"
    ranges = []
    for first, last in node.ranges:  # surrogates are no characters
        for low, high in (
            (first, min(last, SURROGATES[0] - 1)),
            (max(first, SURROGATES[1] + 1), last),
        ):
            if low <= high:
                ranges.append((low, high))
    if not ranges:
        raise ValueError("the characters in [ ] are halves of others")
    written = "".join(
        f"\\x{{{low:x}}}" if low == high else f"\\x{{{low:x}}}-\\x{{{high:x}}}"
        for low, high in ranges
    )
    return f"[{'^' if node.is_negated else ''}{written}]"


def _macro(macro: Macro) -> str:
    options = dict(macro.options)
    match macro:
        case Macro("Regex", (str() as pattern,)) if not options.get("json_string"):
            flags = str(options.get("flags", ""))
            if not FLAGS.issuperset(flags):
                raise ValueError(f"the flags {flags} of Regex are not supported; i, m and s are")
            return f"/{between_slashes(pattern)}/{flags}"
        case Macro("Substring", chunks) if chunks and all(isinstance(x, str) for x in chunks):
            return f"%regex {json.dumps({'substring_chunks': [x for x in chunks if x]})}"
        case Macro("Token" | "ExcludeToken", ids) if ids and all(isinstance(i, int) for i in ids):
            listed = ",".join(map(str, ids))
            return f"<[{'^' if macro.name == 'ExcludeToken' else ''}{listed}]>"
    raise ValueError(f"{macro.name} with these arguments is not supported in a grammar")

"""How many schemas of MaskBench a backend enforces, and whether it does so without a mistake.

    git clone https://github.com/guidance-ai/jsonschemabench
    python benchmarks/maskbench.py jsonschemabench/maskbench/data
    python benchmarks/maskbench.py jsonschemabench/maskbench/data --every 20 --show

An instance is accepted if every byte of it is, and the grammar is complete at its end. Mistakes are
an invalid instance that is accepted and a valid one that is rejected, of schemas that are enforced.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from treadle.api.kinds import STRUCTURED_OUTPUT
from treadle.api.sampling_params import StructuredOutputsParams
from treadle.api.structured_output import CompiledGrammar, GrammarCompiler
from treadle.errors import RequestError
from treadle.plugins import PluginManager
from treadle.structured_output.spec import grammar_spec
from treadle.testing.grammar_vocabulary import SmallTokenizer
from treadle_structured_output_kit.json_schema import subschemas

TOKENIZER = SmallTokenizer()
MAX_STEPS = 20_000


class Result(msgspec.Struct):
    """The counts of one run, and the instances that were mistaken."""

    schemas: int = 0
    enforced: int = 0
    valid: int = 0
    invalid: int = 0
    rejected: list[str] = []
    respelled: list[str] = []
    accepted: list[str] = []
    reasons: Counter[str] = msgspec.field(default_factory=Counter)


def compile_schema(compilers: list[GrammarCompiler], schema: Any) -> CompiledGrammar | str:
    """The grammar of the first backend that can enforce ``schema``, or why none can."""
    try:
        spec = grammar_spec(StructuredOutputsParams(json=schema))
    except RequestError as error:
        return str(error)
    reasons = []
    for compiler in compilers:
        try:
            reason = compiler.unsupported_reason(spec)
            if reason is None:
                return compiler.compile(spec)
        except BaseException as error:  # a panic of a Rust library is no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            reason = str(error)
        reasons.append(f"{compiler.name}: {reason}")
    return "; ".join(reasons)


def accepts(grammar: CompiledGrammar, value: Any) -> bool:
    """Whether the grammar accepts ``value`` as the file writes it."""
    matcher = grammar.matcher()
    text = json.dumps(value, ensure_ascii=False)
    try:
        return all(map(matcher.accept_token, TOKENIZER.encode(text))) and matcher.is_accepting
    except ValueError:  # a limit of the library
        return False


class Search:
    """Looks for a text of a value that a grammar accepts: its keys in any order, numbers spelled
    without exponent and, if they are whole, without a fraction.

    Two orders are tried first, that of each ``properties`` and that in which the whole schema names
    the keys, and no more than ``MAX_STEPS`` parts of each.
    """

    def __init__(self, grammar: CompiledGrammar, schema: Any) -> None:
        self._grammar = grammar
        self._properties = [
            list(part["properties"])
            for _, part in subschemas(schema)
            if isinstance(part, dict) and isinstance(part.get("properties"), dict)
        ]
        self._named = list(dict.fromkeys(_keys(schema)))

    def finds(self, value: Any) -> bool:
        for orders in (self._properties, [self._named]):
            self._matcher, self._steps = self._grammar.matcher(), MAX_STEPS
            self._orders = orders
            try:
                if self._value(value, lambda: self._matcher.is_accepting):
                    return True
            except (ValueError, RecursionError):  # a limit of the library, or of Python
                continue
        return False

    def _value(self, value: Any, then: Callable[[], bool]) -> bool:
        match value:
            case dict():
                return self._text("{", lambda: self._members(value, set(), then))
            case list():
                return self._text("[", lambda: self._items(value, 0, then))
        return any(self._text(text, then) for text in _spellings(value))

    def _items(self, values: list[Any], index: int, then: Callable[[], bool]) -> bool:
        if index == len(values):
            return self._text("]", then)
        comma = ", " if index else ""
        following = partial(self._items, values, index + 1, then)
        return self._text(comma, lambda: self._value(values[index], following))

    def _members(self, value: dict[str, Any], done: set[str], then: Callable[[], bool]) -> bool:
        if len(done) == len(value):
            return self._text("}", then)
        for key in self._order(value):
            if key not in done:
                name = json.dumps(key, ensure_ascii=False)
                following = partial(self._members, value, done | {key}, then)
                member = partial(self._value, value[key], following)
                if self._text(f"{', ' if done else ''}{name}: ", member):
                    return True
        return False

    def _order(self, value: dict[str, Any]) -> list[str]:
        best = max(self._orders, key=lambda order: len(value.keys() & set(order)), default=[])
        return sorted(value, key=lambda key: best.index(key) if key in best else len(best))

    def _text(self, text: str, then: Callable[[], bool]) -> bool:
        """Read ``text`` and go on; the matcher is where it was before if that leads nowhere."""
        self._steps -= 1
        num_read = 0
        for token in TOKENIZER.encode(text):
            if self._steps < 0 or not self._matcher.accept_token(token):
                break
            num_read += 1
        else:
            if then():
                return True
        self._matcher.rollback(num_read)
        return False


def _keys(schema: Any) -> Iterator[str]:
    """Every key of the schema in the order in which it is written."""
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict):
            yield from part
        if isinstance(part, (dict, list)):
            yield from _keys(part)


def _spellings(value: Any) -> Iterator[str]:
    yield json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        yield format(Decimal(repr(value)), "f")
        if value.is_integer():
            yield str(int(value))


def run(files: list[Path], compilers: list[GrammarCompiler]) -> Result:
    result = Result()
    for file in files:
        case = json.loads(file.read_text())
        result.schemas += 1
        grammar = compile_schema(compilers, case["schema"])
        if isinstance(grammar, str):
            result.reasons[re.sub(r" at \$.*|\n.*", "", grammar)[:100]] += 1
            continue
        result.enforced += 1
        for index, test in enumerate(case["tests"]):
            is_accepted = accepts(grammar, test["data"])
            if test["valid"]:
                result.valid += 1
                if not is_accepted:
                    is_found = Search(grammar, case["schema"]).finds(test["data"])
                    names = result.respelled if is_found else result.rejected
                    names.append(f"{file.name} {index}")
            else:
                result.invalid += 1
                if is_accepted:
                    result.accepted.append(f"{file.name} {index}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder of the JSON files")
    parser.add_argument("--backend", action="append", help="repeatable; default: llguidance")
    parser.add_argument("--every", type=int, default=1, help="only every n-th schema")
    parser.add_argument("--show", action="store_true", help="name mistakes and refusals")
    options = parser.parse_args()
    sys.setrecursionlimit(50_000)  # a search goes down with every part of a text
    plugins = PluginManager()
    compilers = [
        plugins.create(
            STRUCTURED_OUTPUT, name, tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size
        )
        for name in options.backend or ["llguidance"]
    ]
    result = run(sorted(options.data.glob("*.json"))[:: options.every], compilers)
    share = result.enforced / max(1, result.schemas)
    print(f"schemas enforced: {result.enforced} of {result.schemas} ({share:.1%})")
    print(f"invalid instances accepted: {len(result.accepted)} of {result.invalid}")
    print(f"valid instances rejected: {len(result.rejected)} of {result.valid}")
    print(f"accepted only in another order or spelling: {len(result.respelled)}")
    if options.show:
        for title, names in (
            ("accepted", result.accepted),
            ("rejected", result.rejected),
            ("respelled", result.respelled),
        ):
            print(f"\n{title}:", *names, sep="\n  ")
        for reason, count in result.reasons.most_common(40):
            print(f"{count:5} {reason}")


if __name__ == "__main__":
    main()

"""Choose what llguidance compiles for each kind of grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from treadle.api.types import CompiledGrammar, GrammarMatcher, GrammarSpec, Tokenizer
from treadle_llguidance.checked import CheckedGrammar, TokenTexts
from treadle_llguidance.limits import unreachable_reason
from treadle_structured_output_kit.dialect import normalize_patterns
from treadle_structured_output_kit.equivalent import rewrite
from treadle_structured_output_kit.json_schema import subschemas
from treadle_structured_output_kit.llguidance import LLGuidanceCompiler, LLGuidanceMatcher
from treadle_structured_output_kit.regex import choice_regex
from treadle_structured_output_kit.value_checks import ValueChecks, needs_checks, without_checks

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("Compiler",)

# Keywords that the library refuses. Listed here so that another backend gets its chance before
# anything is compiled.
REFUSED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
KINDS = ("json_schema", "json_object", "regex", "choice", "ebnf")


class Compiler:
    """A ``GrammarCompiler``. Immutable, safe in threads. ``name`` is the key that it serves."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        vocab_size: int,
        *,
        strict: bool,
        whitespace_pattern: str,
    ) -> None:
        self.name = name
        self._strict = strict
        self._whitespace = whitespace_pattern
        self._texts = TokenTexts(tokenizer, vocab_size)
        self._compiler = LLGuidanceCompiler(tokenizer, vocab_size)

    def unsupported_reason(self, spec: GrammarSpec) -> str | None:
        """Return why ``spec`` cannot be enforced, or ``None``."""
        if spec.kind not in KINDS:
            return f"grammars of the kind {spec.kind} are not supported"
        if spec.kind != "json_schema" or not self._strict:
            return None
        root = rewrite(json.loads(spec.source))
        for path, schema in subschemas(root):
            if not isinstance(schema, dict):
                continue
            if keywords := sorted(REFUSED & schema.keys()):
                return f"{', '.join(keywords)} at {path} cannot be enforced"
            if reason := unreachable_reason(schema):
                return f"{reason}, at {path}, cannot be enforced"
        try:
            _ = needs_checks(root) and ValueChecks(root)
        except ValueError as error:
            return f"{error} cannot be enforced"
        return None

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``. Raises ``ValueError`` with the library's message."""
        spec = normalize_patterns(spec)
        match spec.kind:
            case "json_schema" | "json_object":
                return self._json(spec)
            case "regex":
                return self._compiler.compile_regex(spec.source)
            case "choice":
                return self._compiler.compile_regex(choice_regex(json.loads(spec.source)))
            case _:
                return self._compiler.compile_grammar(spec.source)

    def fill_bitmasks(
        self, matchers: Sequence[GrammarMatcher], bitmask: Tensor, rows: Sequence[int]
    ) -> list[bool | None]:
        """Fill the masks of all matchers without checks of values; those with some go one by one."""
        return _of_plain(matchers, rows, lambda m, r: self._compiler.fill_bitmasks(m, bitmask, r))

    def accept_tokens(
        self, matchers: Sequence[GrammarMatcher], tokens: Sequence[int]
    ) -> list[bool | None]:
        """Advance all matchers without checks of values."""
        return _of_plain(matchers, tokens, self._compiler.accept_tokens)

    def _json(self, spec: GrammarSpec) -> CompiledGrammar:
        schema = (
            {"type": "object"} if spec.kind == "json_object" else rewrite(json.loads(spec.source))
        )
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("no value matches the schema false")
        checks = ValueChecks(schema) if self._strict and needs_checks(schema) else None
        whitespace = spec.options.get("whitespace_pattern", self._whitespace)
        grammar = self._compiler.compile_json_schema(
            without_checks(schema) if checks else schema,
            whitespace_pattern=whitespace,
            lenient=not self._strict,
        )
        return CheckedGrammar(grammar, checks, self._texts) if checks else grammar


Batch = Callable[[Sequence[LLGuidanceMatcher], Sequence[int]], list[bool | None]]


def _of_plain(
    matchers: Sequence[GrammarMatcher], values: Sequence[int], call: Batch
) -> list[bool | None]:
    """Return what ``call`` does for the library's own matchers, ``None`` for each of the others."""
    pairs = list(zip(matchers, values, strict=True))
    plain = [(m, value) for m, value in pairs if isinstance(m, LLGuidanceMatcher)]
    results = call([m for m, _ in plain], [value for _, value in plain]) if plain else []
    if len(plain) == len(pairs):
        return results
    found = iter(results)
    return [next(found) if isinstance(m, LLGuidanceMatcher) else None for m in matchers]

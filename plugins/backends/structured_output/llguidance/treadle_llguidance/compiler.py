"""Choose what llguidance compiles for each kind of grammar."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from treadle.api.types import CompiledGrammar, GrammarMatcher, GrammarSpec, Tokenizer
from treadle_llguidance.checked import CheckedGrammar, TokenTexts
from treadle_structured_output_kit.dialect import normalize_patterns
from treadle_structured_output_kit.equivalent import rewrite
from treadle_structured_output_kit.formats import FORMATS
from treadle_structured_output_kit.json_schema import subschemas
from treadle_structured_output_kit.limits import unreachable_reason
from treadle_structured_output_kit.llguidance import LLGuidanceCompiler, LLGuidanceMatcher
from treadle_structured_output_kit.regex import choice_regex
from treadle_structured_output_kit.structural_tag import parse_structural_tag, schemas_in
from treadle_structured_output_kit.structural_tag_lark import structural_tag_lark
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
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
MAX_REASONS = 16
KINDS = ("json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag")


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
        max_processes: int = 0,
    ) -> None:
        self.name = name
        self._strict = strict
        self._whitespace = whitespace_pattern
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._texts = TokenTexts(tokenizer, vocab_size)
        self._compiler = LLGuidanceCompiler(tokenizer, vocab_size, max_processes)

    def unsupported_reason(self, spec: GrammarSpec) -> str | None:
        """Return why ``spec`` cannot be enforced, or ``None``."""
        if spec.kind not in KINDS:
            return f"grammars of the kind {spec.kind} are not supported"
        if self._is_strict(spec) and (reasons := self._obstacles(spec)):
            return f"{reasons[0]} cannot be enforced"
        return None

    def unenforced(self, spec: GrammarSpec) -> str | None:
        """Return what a JSON schema says that an output need not obey, or ``None``."""
        reasons = [] if self._is_strict(spec) else self._obstacles(spec)
        for source in _schemas_of(spec):
            for path, schema in subschemas(json.loads(source)):
                name = schema.get("format") if isinstance(schema, dict) else None
                if isinstance(name, str) and name not in FORMATS:
                    reasons.append(f"the format {name} at {path}")
        more = f"; and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
        return "; ".join(reasons[:MAX_REASONS]) + more or None

    def _is_strict(self, spec: GrammarSpec) -> bool:
        return self._strict and spec.options.get("strict", True) is not False

    def _obstacles(self, spec: GrammarSpec) -> list[str]:
        """Return what cannot be enforced of the schemas in ``spec``."""
        reasons = []
        for source in _schemas_of(spec):
            root = rewrite(json.loads(source))
            for path, schema in subschemas(root):
                if not isinstance(schema, dict):
                    continue
                if keywords := sorted(REFUSED & schema.keys()):
                    reasons.append(f"{', '.join(keywords)} at {path}")
                if reason := unreachable_reason(schema):
                    reasons.append(f"{reason}, at {path},")
            if not needs_checks(root):
                continue
            if spec.kind == "structural_tag":
                reasons.append("uniqueItems, contains or the format regex in a structural tag")
                continue
            try:
                ValueChecks(root)
            except ValueError as error:
                reasons.append(str(error))
        return reasons

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
            case "structural_tag":
                lark = structural_tag_lark(
                    spec.source,
                    self._tokenizer,
                    self._vocab_size,
                    whitespace_pattern=self._whitespace,
                    lenient=not self._is_strict(spec),
                )
                return self._compiler.compile_grammar(lark)
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
        is_strict, checks = self._is_strict(spec), None
        if self._strict and needs_checks(schema):
            with contextlib.nullcontext() if is_strict else contextlib.suppress(ValueError):
                checks = ValueChecks(schema)
        whitespace = spec.options.get("whitespace_pattern", self._whitespace)
        grammar = self._compiler.compile_json_schema(
            without_checks(schema) if checks else schema,
            whitespace_pattern=whitespace,
            lenient=not is_strict,
        )
        return CheckedGrammar(grammar, checks, self._texts) if checks else grammar


def _schemas_of(spec: GrammarSpec) -> list[str]:
    """Return the JSON schemas in ``spec``, as texts."""
    if spec.kind == "structural_tag":
        return list(schemas_in(parse_structural_tag(spec.source)))
    return [spec.source] if spec.kind == "json_schema" else []


Batch = Callable[[Sequence[LLGuidanceMatcher], Sequence[int]], list[bool | None]]


def _of_plain(
    matchers: Sequence[GrammarMatcher], values: Sequence[int], call: Batch
) -> list[bool | None]:
    """Return what ``call`` does for the library's own matchers, ``None`` for each of the others."""
    if set(map(type, matchers)) <= {LLGuidanceMatcher}:
        return call(matchers, values)  # type: ignore[arg-type]
    pairs = list(zip(matchers, values, strict=True))
    plain = [(m, value) for m, value in pairs if isinstance(m, LLGuidanceMatcher)]
    results = call([m for m, _ in plain], [value for _, value in plain]) if plain else []
    found = iter(results)
    return [next(found) if isinstance(m, LLGuidanceMatcher) else None for m in matchers]

"""Choose what llguidance compiles for each kind of grammar."""

from __future__ import annotations

import json

from treadle.api.types import GrammarSpec, Tokenizer
from treadle_structured_output_kit.dialect import normalize_patterns
from treadle_structured_output_kit.json_schema import subschemas
from treadle_structured_output_kit.llguidance import LLGuidanceCompiler, LLGuidanceGrammar
from treadle_structured_output_kit.regex import choice_regex

__all__ = ("Compiler",)

# Keywords that the library refuses. Listed here so that another backend gets its chance before
# anything is compiled.
REFUSED = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "contains",
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
        "uniqueItems",
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
        self._compiler = LLGuidanceCompiler(tokenizer, vocab_size)
        self.fill_bitmasks = self._compiler.fill_bitmasks
        self.accept_tokens = self._compiler.accept_tokens

    def unsupported_reason(self, spec: GrammarSpec) -> str | None:
        """Return why ``spec`` cannot be enforced, or ``None``."""
        if spec.kind not in KINDS:
            return f"grammars of the kind {spec.kind} are not supported"
        if spec.kind != "json_schema" or not self._strict:
            return None
        for path, schema in subschemas(json.loads(spec.source)):
            if isinstance(schema, dict) and (keywords := sorted(REFUSED & schema.keys())):
                return f"{', '.join(keywords)} at {path} cannot be enforced"
        return None

    def compile(self, spec: GrammarSpec) -> LLGuidanceGrammar:
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

    def _json(self, spec: GrammarSpec) -> LLGuidanceGrammar:
        schema = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.source)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("no value matches the schema false")
        whitespace = spec.options.get("whitespace_pattern", self._whitespace)
        return self._compiler.compile_json_schema(
            schema, whitespace_pattern=whitespace, lenient=not self._strict
        )

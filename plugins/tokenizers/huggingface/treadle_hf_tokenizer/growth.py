"""How much longer a tokenizer can make a text, known from its steps.

``tokenizers`` runs a normalizer to its end, whatever becomes of the text: one that writes a
megabyte for each space takes all memory in a single call. A tokenizer that multiplies text is
refused when it is opened, and a text is compared with what is left before it is encoded.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from treadle.errors import CheckpointError, RequestError
from treadle_hf_tokenizer.token_bound import steps

__all__ = ("MAX_GROWTH", "MAX_TEXT", "TextGrowth", "text_growth")

MAX_GROWTH = 64
"""Characters that a tokenizer's own rules may make of one."""
MAX_TEXT = 64 * 2**20
"""Characters that a text may become."""
MAX_STEPS = 64
MAX_ADDED = 1024
"""Characters or tokens that may be added to a text or a piece of it."""

# What Unicode makes of a single character, at most.
UNICODE: Mapping[str, int] = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 3,
    "BertNormalizer": 36,
    "ByteLevel": 4,
}


@dataclass(frozen=True, slots=True)
class TextGrowth:
    """``factor`` is the largest number of characters that can become of one."""

    factor: int

    def check(self, text: str) -> None:
        """Raise ``RequestError`` if ``text`` could become too long."""
        if self.factor > 1 and len(text) * self.factor > MAX_TEXT:
            raise RequestError(
                f"the text has {len(text)} characters, of which this model's tokenizer can make "
                f"{len(text) * self.factor}; at most {MAX_TEXT} may be made: send less text",
                param="prompt",
            )


def text_growth(backend: Backend) -> TextGrowth:
    """Return the growth of a tokenizer. Raises ``CheckpointError`` if it multiplies text."""
    normalizers = list(steps(backend.normalizer, "normalizers"))
    decoders = list(steps(backend.decoder, "decoders"))
    processors = list(steps(backend.post_processor, "processors"))
    pre_tokenizers = list(steps(backend.pre_tokenizer, "pretokenizers"))
    for name, parts in (
        ("normalizer", normalizers),
        ("decoder", decoders),
        ("post_processor", processors),
        ("pre_tokenizer", pre_tokenizers),
    ):
        if len(parts) > MAX_STEPS:
            raise _refused(f"its {name} has {len(parts)} steps; {MAX_STEPS} are allowed")
    for name, parts in (("normalizer", normalizers), ("decoder", decoders)):
        factor = math.prod(map(_own_growth, parts))
        if factor > MAX_GROWTH:
            raise _refused(
                f"its {name} can make {factor} characters of one; {MAX_GROWTH} are allowed"
            )
        added = sum(len(step.get("prepend", "")) for step in parts)
        if added > MAX_ADDED:
            raise _refused(f"its {name} adds {added} characters; {MAX_ADDED} are allowed")
    for step in processors:
        if step["type"] == "TemplateProcessing":
            _check_template(step)
    for attribute in ("continuing_subword_prefix", "end_of_word_suffix"):
        text = getattr(backend.model, attribute, None) or ""
        if len(text) > MAX_ADDED:
            raise _refused(f"its {attribute} has {len(text)} characters; {MAX_ADDED} are allowed")
    unicode = math.prod(UNICODE.get(step["type"], 1) for step in normalizers)
    return TextGrowth(unicode * math.prod(map(_own_growth, normalizers)))


def _own_growth(step: Mapping[str, Any]) -> int:
    """Return the growth of a rule that the tokenizer itself brings."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return max(1, math.ceil(len(new) / len(old)))
        case {"type": "Replace", "content": str(new)}:
            return len(new) + 1  # a pattern may match nothing, beside every character
        case {"type": "Precompiled", "precompiled_charsmap": str(text)}:
            table = base64.b64decode(text)
            replacements = table[4 + int.from_bytes(table[:4], "little") :]
            return max(len(r.decode("utf-8", "replace")) for r in replacements.split(b"\0")) or 1
    return 1


def _check_template(step: Mapping[str, Any]) -> None:
    pieces = step["single"]
    copies = sum("Sequence" in piece for piece in pieces)
    if copies > 1:
        raise _refused(f"its post_processor repeats a text {copies} times; once is allowed")
    tokens = sum(len(token["ids"]) for token in step["special_tokens"].values()) * len(pieces)
    if tokens > MAX_ADDED:
        raise _refused(f"its post_processor can add {tokens} tokens; {MAX_ADDED} are allowed")


def _refused(problem: str) -> CheckpointError:
    return CheckpointError(f"the tokenizer multiplies text: {problem}. Use another tokenizer")

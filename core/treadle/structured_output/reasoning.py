"""The gate before a grammar: while a model reasons, its output is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from treadle.api.kinds import REASONING_PARSERS
from treadle.api.parsers import SupportsReasoningOpener
from treadle.plugins import PluginManager

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("reasoning_gate",)


def reasoning_gate(
    plugins: PluginManager, parser: str, tokenizer: Tokenizer, prompt_ids: Sequence[int]
) -> tuple[Callable[[int], bool] | None, int | None]:
    """What ``Guide`` takes: a function that takes each token and tells whether the reasoning goes
    on after it, and the token that opens the reasoning if the prompt has left that to the model.

    Nothing if there will be no reasoning: the grammar then holds from the first token. That is so
    too if the text that opens it is more than one token. Where the parser fails, here or in the
    function, that is a ``PluginLoadError``.
    """
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    reasoning = plugins.create_guarded(
        REASONING_PARSERS, parser, tokenizer=tokenizer, prompt=prompt
    )
    opener: int | None = None
    if not reasoning.in_reasoning:
        tag = reasoning.opening_tag if isinstance(reasoning, SupportsReasoningOpener) else None
        ids = tokenizer.encode(tag, add_special_tokens=False) if tag else []
        if len(ids) != 1:
            return None, None
        opener = ids[0]
    stream = tokenizer.create_detokenizer(prompt_ids, skip_special_tokens=False)

    def goes_on(token: int) -> bool:
        reasoning.feed(stream.decode_next(token), [token])
        return reasoning.in_reasoning

    return goes_on, opener

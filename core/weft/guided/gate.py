"""The gate before a grammar: while a model reasons, its output is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weft.plugins import Host

if TYPE_CHECKING:
    from weft.api.files import Tokenizer

__all__ = ("reasoning_gate",)


def reasoning_gate(
    host: Host, parser: str, tokenizer: Tokenizer, prompt_ids: Sequence[int]
) -> Callable[[int], bool] | None:
    """A function that takes each token and tells whether the reasoning goes on after it.

    ``None`` if the prompt leaves no reasoning open: the grammar then holds from the first token.
    """
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    reasoning = host.reasoning_parser(parser, tokenizer, prompt)
    if not reasoning.open:
        return None
    stream = tokenizer.stream(prompt_ids, skip_special_tokens=False)

    def goes_on(token: int) -> bool:
        reasoning.feed(stream.step(token), [token])
        return reasoning.open

    return goes_on

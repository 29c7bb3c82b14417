"""The gate before a grammar: while a model reasons, its output is free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.config import EngineConfig
from weft.plugins import Host

__all__ = ("reasoning_gate",)


def reasoning_gate(
    config: EngineConfig, host: Host, parser: str, prompt_ids: Sequence[int]
) -> Callable[[int], bool] | None:
    """A function that takes each token and tells whether the reasoning goes on after it.

    ``None`` if the prompt leaves no reasoning open: the grammar then holds from the first token.
    """
    from weft.frontend.opening import open_checkpoint

    tokenizer = open_checkpoint(config, host).need_tokenizer()
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    reasoning = host.reasoning_parser(parser, tokenizer, prompt)
    if not reasoning.open:
        return None
    stream = tokenizer.stream(prompt_ids, skip_special_tokens=False)

    def goes_on(token: int) -> bool:
        reasoning.feed(stream.step(token), [token])
        return reasoning.open

    return goes_on

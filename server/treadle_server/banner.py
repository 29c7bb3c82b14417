"""The lines that a starting server prints."""

from __future__ import annotations

from collections.abc import Iterator

import treadle
from treadle_server.context import ServerContext

__all__ = ("banner",)


def banner(context: ServerContext, url: str) -> str:
    return "\n".join(f"{title:<11}{text}" for title, text in lines(context, url))


def lines(context: ServerContext, url: str) -> Iterator[tuple[str, str]]:
    facts, config = context.engine.facts, context.config
    yield f"treadle {treadle.__version__}", ", ".join(context.names)
    backend = f", attention {facts.attention}" if facts.attention else ""
    yield "model", f"{facts.architecture}, {facts.dtype} on {facts.device}{backend}"
    pages = sum(group.pages for group in facts.groups)
    room = f"; cache of {pages} pages, {facts.page_size} tokens each" if pages else ""
    yield "context", f"{facts.max_model_len} tokens{room}"
    for option, key in context.chats.plugins.keys.items():
        if key is not None:
            yield option.partition("_")[0], key
    yield "access", "API key" if config.api_key else "no API key"
    for line in facts.report:
        yield "", line
    yield "listening", url

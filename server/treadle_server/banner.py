"""The lines that a starting server prints."""

from __future__ import annotations

from collections.abc import Iterator

import treadle
from treadle_server.context import ServerContext

__all__ = ("banner",)


def banner(context: ServerContext, url: str) -> str:
    return "\n".join(f"{title:<10} {text}" for title, text in lines(context, url))


def lines(context: ServerContext, url: str) -> Iterator[tuple[str, str]]:
    info, config = context.engine.info, context.config
    yield f"treadle {treadle.__version__}", ", ".join(context.names)
    backend = f", attention {info.attention}" if info.attention else ""
    yield "model", f"{info.architecture}, {info.dtype} on {info.device}{backend}"
    pages = sum(group.num_pages for group in info.kv_cache_groups)
    cache_text = f"; cache of {pages} pages, {info.page_size} tokens each" if pages else ""
    yield "context", f"{info.max_model_len} tokens{cache_text}"
    for option, key in context.chat_processor.parser_plugins.keys.items():
        if key is not None:
            yield option.partition("_")[0], key
    yield "access", "API key" if config.api_key else "no API key"
    for line in info.report:
        yield "", line
    yield "listening", url

"""The chat renderer ``jinja``: a checkpoint's own chat template, in a sandbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from treadle.api import impl
from treadle.api.matching import Match

if TYPE_CHECKING:
    from treadle.api.hookspecs import Options
    from treadle.api.types import ChatRenderer, Tokenizer

__all__ = ("TREADLE_OPTIONS", "JinjaOptions", "treadle_match", "treadle_renderer")


class JinjaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``jinja`` renderer. ``chat_template`` of the engine sets its own."""

    chat_template: Annotated[
        str | None, Meta(description="A Jinja file or text in place of the checkpoint's templates.")
    ] = None


TREADLE_OPTIONS = {"renderers:jinja": JinjaOptions}


@impl
def treadle_match(kind: str, key: str) -> Match | None:
    """Match any model: it runs the checkpoint's own chat template."""
    if (kind, key) != ("renderers", "jinja"):
        return None
    return Match(10, "it renders with the checkpoint's chat template")


@impl
def treadle_renderer(mode: str, tokenizer: Tokenizer, options: Options) -> ChatRenderer | None:
    """Open the renderer of a tokenizer's templates."""
    if mode != "jinja":
        return None
    from treadle_jinja.renderer import open_renderer

    return open_renderer(tokenizer, options.get("chat_template"), isolated=True)

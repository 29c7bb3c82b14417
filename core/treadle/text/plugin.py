"""The built-in tokenizer ``auto`` and the built-in chat renderer ``jinja``, through the public hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from treadle.api.hookspecs import Options, impl
from treadle.api.matching import Match

if TYPE_CHECKING:
    from treadle.api.files import ChatRenderer, ModelFiles, Tokenizer

JINJA = "jinja"


class JinjaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the ``jinja`` renderer. ``chat_template`` of the engine sets the first one."""

    chat_template: Annotated[
        str | None, Meta(description="A Jinja file or text in place of the checkpoint's templates.")
    ] = None
    isolated: Annotated[
        bool,
        Meta(description="Run templates in a process with limits (AsyncLLM and servers: always)."),
    ] = False


TREADLE_OPTIONS = {f"renderers:{JINJA}": JinjaOptions}


@impl
def treadle_tokenizer(mode: str, files: ModelFiles) -> Tokenizer | None:
    if mode != "auto":
        return None
    from treadle.text.tokenizer import AutoTokenizer

    return AutoTokenizer.open(files)


@impl
def treadle_match(kind: str, key: str) -> Match | None:
    """Any model: it runs the checkpoint's own chat template."""
    if (kind, key) != ("renderers", JINJA):
        return None
    return Match(10, "it renders with the checkpoint's chat template")


@impl
def treadle_renderer(mode: str, tokenizer: Tokenizer, options: Options) -> ChatRenderer | None:
    if mode != JINJA:
        return None
    from treadle.text.renderer import open_renderer

    return open_renderer(
        tokenizer, options.get("chat_template"), isolated=bool(options.get("isolated"))
    )

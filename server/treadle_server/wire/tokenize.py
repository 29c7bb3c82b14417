"""``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Any

import msgspec

from treadle_server.wire.messages import Message
from treadle_server.wire.tools import ChatTool

__all__ = ("DetokenizeRequest", "Detokenized", "TokenizeRequest", "Tokenized", "TokenizerInfo")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ChatTool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct, kw_only=True, omit_defaults=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What evaluation tools read from a ``tokenizer_config.json``, under its names."""

    model_max_length: int
    eos_token: str | None
    bos_token: str | None
    add_bos_token: bool
    chat_template: str | None

"""``POST /tokenize``, ``POST /detokenize`` and ``GET /tokenizer_info``. They come through the hook, like a third party's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import Body

from treadle.errors import RequestError
from treadle_server.chat.conversation import to_conversation
from treadle_server.context import ServerContext
from treadle_server.decode import request_body
from treadle_server.openapi import ERROR_RESPONSES
from treadle_server.routes.answers import answer
from treadle_server.wire.tokenize import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)

__all__ = ("handlers",)

MIN_CHARS, CHARS_PER_TOKEN = 2**20, 16
"""Characters of a text that may be tokenized: so many in any case, and for each token of the
context four times those of an average token."""


def handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    strict = context.config.strict_requests

    @post(
        "/tokenize",
        dto=request_body(TokenizeRequest, strict=strict),
        status_code=200,
        responses=ERROR_RESPONSES,
        summary="Encode a text or a conversation",
    )
    async def tokenize(
        data: Annotated[TokenizeRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[Tokenized]:
        context.check_model(data.model)
        client = context.client_of(request)
        result = await context.active_requests.run(
            request.receive, lambda _: tokenized(context, data, client)
        )
        return answer(request, result)

    @post(
        "/detokenize",
        dto=request_body(DetokenizeRequest, strict=strict),
        status_code=200,
        responses=ERROR_RESPONSES,
        summary="Decode token ids",
    )
    async def detokenize(
        data: Annotated[DetokenizeRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[Detokenized]:
        context.check_model(data.model)
        check_ids(context, data.tokens)
        skip, tokenizer = bool(data.skip_special_tokens), context.engine.tokenizer
        work = partial(tokenizer.decode, data.tokens, skip_special_tokens=skip)
        client = context.client_of(request)
        text = await context.active_requests.run(
            request.receive,
            lambda _: context.engine.texts.run(work, len(data.tokens), client=client, inline=True),
        )
        return answer(request, Detokenized(prompt=text))

    @get(
        "/tokenizer_info",
        responses=ERROR_RESPONSES,
        summary="Describe the tokenizer as its configuration file does",
    )
    async def tokenizer_info() -> TokenizerInfo:
        return info_of(context)

    return [tokenize, detokenize, tokenizer_info]


def info_of(context: ServerContext) -> TokenizerInfo:
    """Raises ``CheckpointError`` if the model has no tokenizer."""
    tokenizer = context.engine.tokenizer
    first, eos = tokenizer.encode("a")[:1], tokenizer.eos_token_id
    bos = first[0] if first and first[0] in tokenizer.special_token_ids else None
    return TokenizerInfo(
        model_max_length=context.engine.info.max_model_len,
        eos_token=None if eos is None else tokenizer.id_to_token(eos),
        bos_token=None if bos is None else tokenizer.id_to_token(bos),
        add_bos_token=bos is not None,
        chat_template=tokenizer.chat_template,
    )


async def tokenized(context: ServerContext, data: TokenizeRequest, client: str) -> Tokenized:
    """Return the tokens of a text or a conversation. Raises ``RequestError``."""
    if (data.prompt is None) == (data.messages is None):
        raise RequestError("send either prompt or messages, not both or neither", param="prompt")
    texts, tokenizer = context.engine.texts, context.engine.tokenizer
    if data.messages is not None:
        chat = to_conversation(data, knows_developer=context.knows_developer, client=client)
        check_size(context, chat.num_chars, "messages")
        tokens = (await context.chat_processor.render(chat)).ids or []
    else:
        text, special = data.prompt or "", data.add_special_tokens is not False
        check_size(context, len(text), "prompt")
        encode = partial(tokenizer.encode, text, add_special_tokens=special)
        tokens = await texts.run(encode, len(text), client=client, inline=True)
    result = Tokenized(
        count=len(tokens), max_model_len=context.engine.info.max_model_len, tokens=tokens
    )
    if data.return_token_strs:
        result.token_strs = await texts.run(
            lambda: [tokenizer.id_to_token(token) for token in tokens],
            len(tokens),
            client=client,
            inline=True,
        )
    return result


def check_size(context: ServerContext, num_chars: int, param: str) -> None:
    """Refuse texts that are much longer than a context: they may be counted, but not for hours."""
    most = max(MIN_CHARS, CHARS_PER_TOKEN * context.engine.info.max_model_len)
    if num_chars > most:
        raise RequestError(
            f"{param} has {num_chars} characters; this model's context lets at most {most} be "
            "tokenized: send it in parts",
            param=param,
        )


def check_ids(context: ServerContext, tokens: Sequence[int]) -> None:
    max_len, width = context.engine.info.max_model_len, context.engine.tokenizer.vocab_size
    if len(tokens) > max_len:
        raise RequestError(
            f"tokens has {len(tokens)} entries; at most {max_len} are allowed", param="tokens"
        )
    for token in tokens:
        if not 0 <= token < width:
            raise RequestError(
                f"tokens holds {token}; ids of this tokenizer are in [0, {width - 1}]",
                param="tokens",
            )

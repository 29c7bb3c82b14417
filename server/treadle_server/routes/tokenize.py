"""``POST /tokenize`` and ``POST /detokenize``. They come through the hook, like a third party's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import Body

from treadle.errors import RequestError
from treadle_server.context import ServerContext
from treadle_server.decode import request_body
from treadle_server.messages import to_conversation
from treadle_server.openapi import ERROR_RESPONSES
from treadle_server.routes.answers import answer
from treadle_server.wire.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

__all__ = ("handlers",)


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
        tokens = await encode(context, data)
        found = Tokenized(
            count=len(tokens),
            max_model_len=context.engine.info.max_model_len,
            tokens=tokens,
        )
        if data.return_token_strs:
            found.token_strs = [context.engine.tokenizer.id_to_token(t) for t in tokens]
        return answer(request, found)

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

        def work() -> str:
            return tokenizer.decode(data.tokens, skip_special_tokens=skip)

        text = await context.run_in_thread_if_large(len(data.tokens), work)
        return answer(request, Detokenized(prompt=text))

    return [tokenize, detokenize]


async def encode(context: ServerContext, data: TokenizeRequest) -> list[int]:
    if (data.prompt is None) == (data.messages is None):
        raise RequestError("send either prompt or messages, not both or neither", param="prompt")
    if data.messages is not None:
        chat = to_conversation(data, knows_developer=context.knows_developer)
        prompt = await context.chat_processor.render(chat)
        return prompt.ids or []
    text, special = data.prompt or "", data.add_special_tokens is not False
    tokenizer = context.engine.tokenizer
    return await context.run_in_thread_if_large(
        len(text), lambda: tokenizer.encode(text, add_special_tokens=special)
    )


def check_ids(context: ServerContext, tokens: Sequence[int]) -> None:
    most, width = context.engine.info.max_model_len, context.engine.tokenizer.vocab_size
    if len(tokens) > most:
        raise RequestError(
            f"tokens has {len(tokens)} entries; at most {most} are allowed", param="tokens"
        )
    for token in tokens:
        if not 0 <= token < width:
            raise RequestError(
                f"tokens holds {token}; ids of this tokenizer are in [0, {width - 1}]",
                param="tokens",
            )

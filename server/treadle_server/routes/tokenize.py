"""``POST /tokenize`` and ``POST /detokenize``. They come through the hook, like a third party's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Request, Response, post
from litestar.handlers import HTTPRouteHandler

from treadle.errors import RequestError
from treadle_server.chat.prepare import render
from treadle_server.context import Context
from treadle_server.decode import Reader
from treadle_server.messages import template_arguments, to_tools
from treadle_server.routes.answers import json_answer, read
from treadle_server.wire.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

__all__ = ("handlers",)


def handlers(context: Context) -> list[HTTPRouteHandler]:
    strict = context.config.strict_requests
    texts, ids = Reader(TokenizeRequest, strict=strict), Reader(DetokenizeRequest, strict=strict)

    @post("/tokenize", status_code=200)
    async def tokenize(request: Request[Any, Any, Any]) -> Response[Any]:
        wanted, headers = await read(request, texts)
        context.check_model(wanted.model)
        tokens = await encode(context, wanted)
        answer = Tokenized(
            count=len(tokens),
            max_model_len=context.engine.facts.max_model_len,
            tokens=tokens,
        )
        if wanted.return_token_strs:
            answer.token_strs = [context.engine.tokenizer.token(t) for t in tokens]
        return json_answer(answer, headers=headers)

    @post("/detokenize", status_code=200)
    async def detokenize(request: Request[Any, Any, Any]) -> Response[Any]:
        wanted, headers = await read(request, ids)
        context.check_model(wanted.model)
        check_ids(context, wanted.tokens)
        skip, tokenizer = bool(wanted.skip_special_tokens), context.engine.tokenizer

        def work() -> str:
            return tokenizer.decode(wanted.tokens, skip_special_tokens=skip)

        text = await context.off_loop(len(wanted.tokens), work)
        return json_answer(Detokenized(prompt=text), headers=headers)

    return [tokenize, detokenize]


async def encode(context: Context, wanted: TokenizeRequest) -> list[int]:
    if (wanted.prompt is None) == (wanted.messages is None):
        raise RequestError("send either prompt or messages, not both or neither", param="prompt")
    if wanted.messages is not None:
        _, ids = await render(
            context,
            wanted.messages,
            to_tools(wanted.tools),
            add_generation_prompt=wanted.add_generation_prompt,
            continue_final_message=wanted.continue_final_message,
            arguments=template_arguments(wanted.chat_template_kwargs, None),
        )
        return ids
    text, special = wanted.prompt or "", wanted.add_special_tokens is not False
    tokenizer = context.engine.tokenizer
    return await context.off_loop(
        len(text), lambda: tokenizer.encode(text, add_special_tokens=special)
    )


def check_ids(context: Context, tokens: Sequence[int]) -> None:
    most, width = context.engine.facts.max_model_len, context.engine.tokenizer.vocab_size
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

"""``/api/tags``, ``/api/ps``, ``/api/show`` and ``/api/version``: what is served, for clients that ask first."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import Body
from msgspec import Meta

from treadle.errors import CheckpointError, RequestError
from treadle_ollama.answer import timestamp
from treadle_ollama.request import ShowRequest
from treadle_ollama.routes import RESPONSES
from treadle_ollama.translate import served_name
from treadle_server.surfaces import ServerContext, answer, fill_in_prompt, request_body

__all__ = ("API_VERSION", "model_handlers")

API_VERSION = "0.12.11"
"""The version of Ollama whose API these routes follow. Clients compare it with the least that they
need, so that treadle's own would mislead them; that is at ``/version``."""
FOREVER = 2**32
"""Seconds from the start of the server until its model is unloaded: after its end."""
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


Name = Annotated[str, Meta(description="A name that requests may use.")]
Modified = Annotated[str, Meta(description="When the server started, as RFC 3339 says.")]


class ModelDetails(msgspec.Struct, kw_only=True):
    parent_model: Annotated[str, Meta(description="Always empty.")] = ""
    format: Annotated[str, Meta(description="The format of the weights.")]
    family: Annotated[str, Meta(description="The model type of the checkpoint.")]
    families: Annotated[list[str], Meta(description="The model type alone.")]
    parameter_size: Annotated[
        str, Meta(description="The number of parameters; empty for quantized weights.")
    ]
    quantization_level: Annotated[
        str, Meta(description="How the weights are quantized, or their dtype.")
    ]


class ModelEntry(msgspec.Struct, kw_only=True):
    name: Name
    model: Name
    size: Annotated[int, Meta(description="The bytes of the weights.")]
    digest: Annotated[str, Meta(description="Changes with the model and what runs it.")]
    details: Annotated[ModelDetails, Meta(description="What the checkpoint is.")]


class ListedModel(ModelEntry, kw_only=True):
    modified_at: Modified


class RunningModel(ModelEntry, kw_only=True):
    expires_at: Annotated[str, Meta(description="Far away: the model stays loaded.")]
    size_vram: Annotated[int, Meta(description="The bytes of the weights that are on a GPU.")]
    context_length: Annotated[int, Meta(description="Tokens that a context has room for.")]


class ModelTags(msgspec.Struct, kw_only=True):
    models: Annotated[list[ListedModel], Meta(description="One entry for each served name.")]


class RunningModels(msgspec.Struct, kw_only=True):
    models: Annotated[list[RunningModel], Meta(description="One entry for each served name.")]


class ShownModel(msgspec.Struct, kw_only=True):
    parameters: Annotated[str, Meta(description="Always empty.")]
    template: Annotated[str, Meta(description="The chat template, in its own language.")]
    details: Annotated[ModelDetails, Meta(description="What the checkpoint is.")]
    model_info: Annotated[dict[str, Any], Meta(description="Sizes of the model.")]
    capabilities: Annotated[
        list[str], Meta(description="completion, and tools, thinking, insert where they work.")
    ]
    modified_at: Modified


class OllamaVersion(msgspec.Struct, kw_only=True):
    version: Annotated[str, Meta(description="The version of Ollama that has these routes.")]


def model_handlers(context: ServerContext) -> list[HTTPRouteHandler]:
    def shared(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "size": context.engine.info.weights_bytes,
            "digest": hashlib.sha256(context.fingerprint.encode()).hexdigest(),
            "details": details(context),
        }

    @get(
        "/api/tags",
        responses=RESPONSES,
        summary="List the names that requests may use, in the form of Ollama",
    )
    async def tags() -> ModelTags:
        modified = timestamp(context.started)
        return ModelTags(
            models=[ListedModel(**shared(n), modified_at=modified) for n in context.names]
        )

    @get("/api/ps", responses=RESPONSES, summary="List the loaded models: those that are served")
    async def ps() -> RunningModels:
        info = context.engine.info
        running: dict[str, Any] = {
            "expires_at": timestamp(context.started + FOREVER),
            "size_vram": 0 if info.device.startswith("cpu") else info.weights_bytes,
            "context_length": info.max_model_len,
        }
        return RunningModels(models=[RunningModel(**shared(n), **running) for n in context.names])

    @post(
        "/api/show",
        dto=request_body(ShowRequest, strict=context.config.strict_requests),
        status_code=200,
        responses=RESPONSES,
        summary="Describe one model, in the form of Ollama",
    )
    async def show(
        data: Annotated[ShowRequest, Body()], request: Request[Any, Any, Any]
    ) -> Response[ShownModel]:
        served_name(context, data.model or data.name)
        return answer(request, shown(context))

    @get(
        "/api/version",
        responses=RESPONSES,
        summary="Tell the version of Ollama whose API is served",
    )
    async def version() -> OllamaVersion:
        return OllamaVersion(version=API_VERSION)

    return [tags, ps, show, version]


def shown(context: ServerContext) -> ShownModel:
    info, family = context.engine.info, family_of(context)
    model_info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": context.model,
        f"{family}.context_length": info.max_model_len,
        f"{family}.vocab_size": info.vocab_size,
    }
    if (count := parameter_count(context)) is not None:
        model_info["general.parameter_count"] = count
    config = context.engine.assets.traits.config
    for name, key in (
        ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"),
        ("attention.head_count", "num_attention_heads"),
    ):
        if isinstance(config.get(key), int):
            model_info[f"{family}.{name}"] = config[key]
    return ShownModel(
        parameters="",
        template=context.engine.assets.traits.templates.get("default", ""),
        details=details(context),
        model_info=model_info,
        capabilities=capabilities(context),
        modified_at=timestamp(context.started),
    )


def capabilities(context: ServerContext) -> list[str]:
    parsers = context.chat_processor.parser_plugins
    served = ["completion"]
    if parsers.tool_call_parser is not None:
        served.append("tools")
    if parsers.reasoning_parser is not None:
        served.append("thinking")
    try:
        fill_in_prompt("a", "b", context.engine.tokenizer)
    except (RequestError, CheckpointError):
        return served
    return [*served, "insert"]


def details(context: ServerContext) -> ModelDetails:
    family = family_of(context)
    count = parameter_count(context)
    return ModelDetails(
        format="safetensors",
        family=family,
        families=[family],
        parameter_size="" if count is None else in_words(count),
        quantization_level=quantization(context) or context.engine.info.dtype,
    )


def family_of(context: ServerContext) -> str:
    """Return the model type of the checkpoint, such as ``llama``."""
    model_type = context.engine.assets.traits.config.get("model_type")
    return model_type if isinstance(model_type, str) else context.engine.info.architecture


def quantization(context: ServerContext) -> str | None:
    config = context.engine.assets.traits.config.get("quantization_config")
    return str(config.get("quant_method", "")) if isinstance(config, dict) else None


def parameter_count(context: ServerContext) -> int | None:
    """Return the number of parameters; ``None`` if the bytes of the weights do not tell."""
    info = context.engine.info
    size = BYTES.get(info.dtype)
    if size is None or not info.weights_bytes or quantization(context) is not None:
        return None
    return info.weights_bytes // size


def in_words(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)

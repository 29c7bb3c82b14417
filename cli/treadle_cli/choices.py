"""Every choice that a start would make, with the runner-up and why, for ``treadle serve --explain``.

The model is built on the ``meta`` device: its layers ask for attention and kernels as always, and
no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from treadle.api.attention import (
    AttentionOffer,
    AttentionRequest,
    KernelOffer,
    KernelRequest,
    Refusal,
)
from treadle.api.cache import DeviceInfo
from treadle.api.communicators import CommunicatorOffer, CommunicatorRequest
from treadle.api.kinds import ATTENTION_BACKENDS, COMMUNICATORS, KERNEL_OPS, MODELS
from treadle.config import DeviceConfig, EngineConfig, SchedulerConfig
from treadle.errors import PluginLoadError
from treadle.layers import SingleRankCommunicator, device_info
from treadle.layers.device import dtype_name, pick_device
from treadle.layers.fusion import apply_fusions
from treadle.loading import fetch, parse_ref, read_config
from treadle.loading.build import empty_model, find_method, find_model
from treadle.loading.config import max_model_len, resolve_dtype, text_config
from treadle.loading.formats import detect_format
from treadle.loading.matching import AUTO, Decision
from treadle.loading.sources import files_in
from treadle.plugins import PluginManager
from treadle.plugins.kinds import FALLBACK
from treadle.runner.attention import AttentionLayers
from treadle.sampling.kernels import SAMPLER_OPS
from treadle.structured_output.manager import preferred_order
from treadle.text.assets import FrontendAssets, choose_renderer
from treadle.text.parser_plugins import PARSER_KINDS, choose_parser

__all__ = ("ConfigChoice", "decided", "explain")


class ConfigChoice(msgspec.Struct, frozen=True):
    """One choice. ``others`` are what was not taken, the runner-up first, and why not."""

    name: str
    choice: str
    reason: str
    others: Sequence[tuple[str, str]] = ()


def explain(
    config: EngineConfig, plugins: PluginManager, opened: FrontendAssets
) -> Iterator[ConfigChoice]:
    """What an engine would run. Raises what its start would raise."""
    yield from _text(config, plugins, opened)
    yield from _model(config, plugins)
    yield _named(
        plugins,
        "distributed-executor-backend",
        "executors",
        config.device.distributed_executor_backend,
        DeviceConfig().distributed_executor_backend,
    )
    policy, usual = config.scheduler.scheduling_policy, SchedulerConfig().scheduling_policy
    yield _named(plugins, "scheduling-policy", "scheduling_policies", policy, usual)
    yield _guided(plugins, config.plugins.structured_output_backends)
    for option, kind in PARSER_KINDS.items():
        found = choose_parser(option, config.model, plugins, opened.traits)
        yield decided(plugins, option.replace("_", "-"), kind.name, found)


def decided(plugins: PluginManager, what: str, kind: str, found: Decision) -> ConfigChoice:
    """A choice by match."""
    others = [
        (c.key, f"{c.reason} (score {c.score})" if c.score else c.reason) for c in found.others
    ]
    choice = "none" if found.key is None else _owned(plugins, kind, found.key)
    return ConfigChoice(what, choice, found.reason, others)


def _owned(plugins: PluginManager, kind: str, key: str) -> str:
    """A key and who serves it, with what made it the owner."""
    entry = plugins.choose(kind, key)
    marks = ["as the fallback"] if entry.key == FALLBACK else []
    marks += ["pinned"] if f"{kind}:{key}" in plugins.switches.pins else []
    marks += ["an override"] if entry.override else []
    return f"{key} ({', '.join([entry.owner, *marks])})"


def _named(plugins: PluginManager, what: str, kind: str, key: str, usual: str) -> ConfigChoice:
    """A choice by name: nobody is asked."""
    others = [(name, f"taken with --{what} {name}") for name in plugins.keys(kind) if name != key]
    said = "the default" if key == usual else f"--{what} {key}"
    return ConfigChoice(what, _owned(plugins, kind, key), said, others)


def _text(
    config: EngineConfig, plugins: PluginManager, opened: FrontendAssets
) -> Iterator[ConfigChoice]:
    model = config.model
    ref = parse_ref(model.model, model.revision, model.download_dir)
    source = _owned(plugins, "model_sources", ref.scheme)
    yield ConfigChoice("model-source", source, "the model's name says so")
    if opened.tokenizer is None:
        yield ConfigChoice("tokenizer-mode", "none", "the checkpoint has no tokenizer files")
        return
    yield _named(plugins, "tokenizer-mode", "tokenizers", model.tokenizer_mode, AUTO)
    yield decided(plugins, "renderer", "renderers", choose_renderer(config, plugins, opened.traits))


def _model(config: EngineConfig, plugins: PluginManager) -> Iterator[ConfigChoice]:
    model = config.model
    ref = parse_ref(model.model, model.revision, model.download_dir)
    files = fetch(plugins, ref, weights=False)
    _, hf_config = read_config(files, model.hf_overrides)
    device = pick_device(config.device.device)
    info = device_info(device)
    dtype = resolve_dtype(model.dtype, hf_config, info)
    found = find_model(plugins, hf_config).architecture
    others = [(n, "no plugin serves it") for n in hf_config.architectures or () if n != found]
    yield ConfigChoice(
        "architecture", _owned(plugins, "models", found), "config.json names it", others
    )
    yield _load_format(config, plugins, files.root)
    method = find_method(plugins, hf_config, model.quantization)
    yield decided(plugins, "quantization", "quantization", method)
    said = "what torch finds" if config.device.device == AUTO else "--device"
    yield ConfigChoice("device", f"{device} {info.name}".strip(), said)
    said = "the checkpoint's, as this device can run it" if model.dtype == AUTO else "--dtype"
    yield ConfigChoice("dtype", dtype_name(dtype), said)
    yield from _layers(config, plugins, hf_config, info, dtype)


def _layers(
    config: EngineConfig,
    plugins: PluginManager,
    hf_config: Any,
    info: DeviceInfo,
    dtype: torch.dtype,
) -> Iterator[ConfigChoice]:
    """Who serves the operations of the model's layers and of the sampler."""
    attention, asked, meta = (
        AttentionLayers(config, plugins, info),
        Asked(plugins),
        torch.device("meta"),
    )
    ranks = SingleRankCommunicator()
    ranks.world_size = config.device.tensor_parallel_size  # the first one's share is asked for
    try:
        model, _, _ = empty_model(
            hf_config,
            plugins,
            meta,
            info,
            dtype,
            ranks,
            attention.register,
            quantization=config.model.quantization,
            max_model_len=max_model_len(hf_config, config.model.max_model_len),
        )
        attention.allocate([2] * len(attention.cache_groups), meta, model)
        apply_fusions(model, asked, info, dtype_name(dtype))
    except PluginLoadError as error:
        if error.plugin is None or not error.plugin.startswith(f"{MODELS.name}:"):
            raise
        # a model may want memory while it is built
        said = f"the model cannot be built on the device meta: {error.__cause__}"
        yield ConfigChoice("attention-backend", "unknown", said)
    for op in SAMPLER_OPS:
        shape = {"vocab_size": text_config(hf_config).vocab_size}
        asked.kernel(op, KernelRequest(info, dtype_name(dtype), shape))
    if config.device.tensor_parallel_size > 1:
        yield _communicator(plugins, info, config.device.tensor_parallel_size)
    for group in attention.attention_groups:
        yield _attention(plugins, group.request, group.name, config.device.attention_backend)
    yield from asked.rows()


def _load_format(config: EngineConfig, plugins: PluginManager, root: Any) -> ConfigChoice:
    what, named = "load-format", config.model.load_format
    if named != AUTO:
        return _named(plugins, what, "load_formats", named, AUTO)
    found = detect_format(files_in(root, ("*",), str(root)))
    if found is None:
        return ConfigChoice(
            what, AUTO, "no weights are here yet: safetensors if there are, else pt"
        )
    others = [] if found == "pt" else [("pt", "taken where there are no safetensors")]
    return ConfigChoice(what, _owned(plugins, "load_formats", found), "the files are of it", others)


def _attention(
    plugins: PluginManager, request: AttentionRequest, name: str, pin: str | None
) -> ConfigChoice:
    offers, refusals = plugins.offers(ATTENTION_BACKENDS, request=request)
    heads = f"{request.num_heads} heads of {request.head_size}, {request.num_kv_heads} of keys and values"
    window = f", window {request.window}" if request.window else ""
    said = f"--attention-backend {pin}" if pin else f"the best offer ({offers[0].score})"
    others = _bids([o for o in offers if o.name != name], refusals)
    choice = _bidder(plugins, "attention_backends", name)
    return ConfigChoice("attention-backend", choice, f"{said} for {heads}{window}", others)


def _communicator(plugins: PluginManager, info: DeviceInfo, world_size: int) -> ConfigChoice:
    request = CommunicatorRequest(info, world_size)
    offers, refusals = plugins.offers(COMMUNICATORS, request=request)
    choice = _bidder(plugins, "communicators", offers[0].name) if offers else "torch.distributed"
    reason = f"the best offer ({offers[0].score})" if offers else "nobody offers"
    return ConfigChoice("communicator", choice, reason, _bids(offers[1:], refusals))


def _bidder(plugins: PluginManager, kind: str, name: str) -> str:
    """A backend may offer under another name than its key."""
    return _owned(plugins, kind, name) if name in plugins.keys(kind) else name


def _bids(
    offers: Sequence[AttentionOffer | KernelOffer | CommunicatorOffer], refusals: Sequence[Refusal]
) -> list[tuple[str, str]]:
    made = [(offer.name, f"offers with score {offer.score}") for offer in offers]
    return made + [(refusal.name, "; ".join(refusal.reasons)) for refusal in refusals]


def _guided(plugins: PluginManager, named: Sequence[str]) -> ConfigChoice:
    order = list(named) or preferred_order(plugins)
    if not order:
        return ConfigChoice(
            "structured-output-backends", "none", "no structured output backend is installed"
        )
    said = "--structured-output-backends" if named else "the best of those that are installed"
    others = [(name, "asked for what those before it refuse") for name in order[1:]]
    return ConfigChoice(
        "structured-output-backends", _owned(plugins, "structured_output", order[0]), said, others
    )


class Asked:
    """Stands for the host where layers ask for kernels: keeps the offers, and makes none."""

    def __init__(self, plugins: PluginManager) -> None:
        self._host = plugins
        self._bids: dict[str, tuple[list[KernelOffer], list[Refusal]]] = {}

    def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None:
        found = self._host.offers(KERNEL_OPS, op=op, request=request)
        # Of layers with several sizes, one that somebody offers for says most.
        if op not in self._bids or not self._bids[op][0]:
            self._bids[op] = found
        return None

    def rows(self) -> Iterator[ConfigChoice]:
        """One for all operations that end alike."""
        alike: dict[tuple[Any, ...], list[str]] = {}
        for op, (offers, refusals) in self._bids.items():
            key = (
                tuple((o.name, o.score) for o in offers),
                tuple((r.name, r.reasons) for r in refusals),
            )
            alike.setdefault(key, []).append(op)
        for ops in alike.values():
            offers, refusals = self._bids[ops[0]]
            if offers:
                name = _bidder(self._host, "kernel_ops", offers[0].name)
                said = f"the best offer ({offers[0].score}) for"
            else:
                name, said = "treadle's own", "nobody offers"
            yield ConfigChoice(
                "kernels", name, f"{said} {', '.join(ops)}", _bids(offers[1:], refusals)
            )

"""Every choice that a start would make, with the runner-up and why, for ``treadle serve --explain``.

The model is built on the ``meta`` device: its layers ask for attention and kernels as always, and
no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from treadle.api.attention import AttentionRequest, KernelOffer, KernelRequest, Offer, Refusal
from treadle.api.cache import DeviceInfo
from treadle.api.communicators import CommunicatorOffer, CommunicatorRequest
from treadle.api.kinds import ATTENTION, COMMUNICATORS, KERNELS, MODELS
from treadle.config import DeviceConfig, EngineConfig, SchedulerConfig
from treadle.errors import PluginLoadError
from treadle.layers import SingleRankCommunicator
from treadle.layers.fusion import apply_fusions
from treadle.loading import fetch, parse_ref, read_config
from treadle.loading.build import empty_model, find_method, find_model
from treadle.loading.config import max_model_len, resolve_dtype, text_config
from treadle.loading.formats import detect_format
from treadle.loading.sources import files_in
from treadle.plugins import PluginManager
from treadle.plugins.kinds import FALLBACK
from treadle.plugins.matching import AUTO, Decision
from treadle.runner.attention import AttentionLayers
from treadle.runner.device import describe, dtype_name, pick_device
from treadle.sampling.kernels import SAMPLER_OPS
from treadle.structured_output.manager import preferred_order
from treadle.text.assets import Opened, choose_renderer
from treadle.text.parser_plugins import PARSER_KINDS, choose_parser

__all__ = ("Explained", "decided", "explain")


class Explained(msgspec.Struct, frozen=True):
    """One choice. ``others`` are what was not taken, the runner-up first, and why not."""

    what: str
    choice: str
    reason: str
    others: Sequence[tuple[str, str]] = ()


def explain(config: EngineConfig, host: PluginManager, opened: Opened) -> Iterator[Explained]:
    """What an engine would run. Raises what its start would raise."""
    yield from _text(config, host, opened)
    yield from _model(config, host)
    yield _named(host, "executor", "executors", config.device.executor, DeviceConfig().executor)
    policy, usual = config.scheduler.scheduling_policy, SchedulerConfig().scheduling_policy
    yield _named(host, "scheduling-policy", "policies", policy, usual)
    yield _guided(host, config.plugins.guided_backends)
    for option, kind in PARSER_KINDS.items():
        found = choose_parser(option, config.model, host, opened.traits)
        yield decided(host, option.replace("_", "-"), kind.name, found)


def decided(host: PluginManager, what: str, kind: str, found: Decision) -> Explained:
    """A choice by match."""
    others = [
        (c.key, f"{c.reason} (score {c.score})" if c.score else c.reason) for c in found.others
    ]
    choice = "none" if found.key is None else _owned(host, kind, found.key)
    return Explained(what, choice, found.reason, others)


def _owned(host: PluginManager, kind: str, key: str) -> str:
    """A key and who serves it, with what made it the owner."""
    entry = host.choose(kind, key)
    marks = ["as the fallback"] if entry.key == FALLBACK else []
    marks += ["pinned"] if f"{kind}:{key}" in host.switches.pins else []
    marks += ["an override"] if entry.override else []
    return f"{key} ({', '.join([entry.owner, *marks])})"


def _named(host: PluginManager, what: str, kind: str, key: str, usual: str) -> Explained:
    """A choice by name: nobody bids or matches."""
    others = [(name, f"taken with --{what} {name}") for name in host.keys(kind) if name != key]
    said = "the default" if key == usual else f"--{what} {key}"
    return Explained(what, _owned(host, kind, key), said, others)


def _text(config: EngineConfig, host: PluginManager, opened: Opened) -> Iterator[Explained]:
    model = config.model
    ref = parse_ref(model.model, model.revision, model.download_dir)
    source = _owned(host, "model_sources", ref.scheme)
    yield Explained("model-source", source, "the model's name says so")
    if opened.tokenizer is None:
        yield Explained("tokenizer-mode", "none", "the checkpoint has no tokenizer files")
        return
    yield _named(host, "tokenizer-mode", "tokenizers", model.tokenizer_mode, AUTO)
    yield decided(host, "renderer", "renderers", choose_renderer(config, host, opened.traits))


def _model(config: EngineConfig, host: PluginManager) -> Iterator[Explained]:
    model = config.model
    ref = parse_ref(model.model, model.revision, model.download_dir)
    files = fetch(host, ref, weights=False)
    _, hf_config = read_config(files, model.hf_overrides)
    device = pick_device(config.device.device)
    info = describe(device)
    dtype = resolve_dtype(model.dtype, hf_config, info)
    found = find_model(host, hf_config).architecture
    others = [(n, "no plugin serves it") for n in hf_config.architectures or () if n != found]
    yield Explained("architecture", _owned(host, "models", found), "config.json names it", others)
    yield _load_format(config, host, files.root)
    method = find_method(host, hf_config, model.quantization)
    yield decided(host, "quantization", "quantization", method)
    said = "what torch finds" if config.device.device == AUTO else "--device"
    yield Explained("device", f"{device} {info.name}".strip(), said)
    said = "the checkpoint's, as this device can run it" if model.dtype == AUTO else "--dtype"
    yield Explained("dtype", dtype_name(dtype), said)
    yield from _layers(config, host, hf_config, info, dtype)


def _layers(
    config: EngineConfig, host: PluginManager, hf_config: Any, info: DeviceInfo, dtype: torch.dtype
) -> Iterator[Explained]:
    """Who serves the operations of the model's layers and of the sampler."""
    attention, asked, meta = AttentionLayers(config, host, info), Asked(host), torch.device("meta")
    ranks = SingleRankCommunicator()
    ranks.world_size = config.device.tensor_parallel_size  # the first one's share is asked for
    try:
        model, _, _ = empty_model(
            hf_config,
            host,
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
        yield Explained("attention-backend", "unknown", said)
    for op in SAMPLER_OPS:
        shape = {"vocab_size": text_config(hf_config).vocab_size}
        asked.kernel(op.name, KernelRequest(info, dtype_name(dtype), shape))
    if config.device.tensor_parallel_size > 1:
        yield _communicator(host, info, config.device.tensor_parallel_size)
    for group in attention.plan_groups:
        yield _attention(host, group.request, group.name, config.device.attention_backend)
    yield from asked.rows()


def _load_format(config: EngineConfig, host: PluginManager, root: Any) -> Explained:
    what, named = "load-format", config.model.load_format
    if named != AUTO:
        return _named(host, what, "load_formats", named, AUTO)
    found = detect_format(files_in(root, ("*",), str(root)))
    if found is None:
        return Explained(what, AUTO, "no weights are here yet: safetensors if there are, else pt")
    others = [] if found == "pt" else [("pt", "taken where there are no safetensors")]
    return Explained(what, _owned(host, "load_formats", found), "the files are of it", others)


def _attention(
    host: PluginManager, request: AttentionRequest, name: str, pin: str | None
) -> Explained:
    offers, refusals = host.offers(ATTENTION, request=request)
    heads = f"{request.heads} heads of {request.head_size}, {request.kv_heads} of keys and values"
    window = f", window {request.window}" if request.window else ""
    said = f"--attention-backend {pin}" if pin else f"the best bid ({offers[0].score})"
    others = _bids([o for o in offers if o.name != name], refusals)
    choice = _bidder(host, "attention", name)
    return Explained("attention-backend", choice, f"{said} for {heads}{window}", others)


def _communicator(host: PluginManager, info: DeviceInfo, world_size: int) -> Explained:
    request = CommunicatorRequest(info, world_size)
    offers, refusals = host.offers(COMMUNICATORS, request=request)
    choice = _bidder(host, "communicators", offers[0].name) if offers else "torch.distributed"
    reason = f"the best bid ({offers[0].score})" if offers else "nobody offers"
    return Explained("communicator", choice, reason, _bids(offers[1:], refusals))


def _bidder(host: PluginManager, kind: str, name: str) -> str:
    """A backend may bid under another name than its key."""
    return _owned(host, kind, name) if name in host.keys(kind) else name


def _bids(
    offers: Sequence[Offer | KernelOffer | CommunicatorOffer], refusals: Sequence[Refusal]
) -> list[tuple[str, str]]:
    made = [(offer.name, f"bids {offer.score}") for offer in offers]
    return made + [(refusal.name, "; ".join(refusal.reasons)) for refusal in refusals]


def _guided(host: PluginManager, named: Sequence[str]) -> Explained:
    order = list(named) or preferred_order(host)
    if not order:
        return Explained("guided-backends", "none", "no guided decoding backend is installed")
    said = "--guided-backends" if named else "the best of those that are installed"
    others = [(name, "asked for what those before it refuse") for name in order[1:]]
    return Explained("guided-backends", _owned(host, "guided", order[0]), said, others)


class Asked:
    """Stands for the host where layers ask for kernels: keeps the bids, and offers none."""

    def __init__(self, host: PluginManager) -> None:
        self._host = host
        self._bids: dict[str, tuple[list[KernelOffer], list[Refusal]]] = {}

    def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None:
        found = self._host.offers(KERNELS, op=op, request=request)
        # Of layers with several sizes, one that somebody offers for says most.
        if op not in self._bids or not self._bids[op][0]:
            self._bids[op] = found
        return None

    def rows(self) -> Iterator[Explained]:
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
                name = _bidder(self._host, "kernels", offers[0].name)
                said = f"the best bid ({offers[0].score}) for"
            else:
                name, said = "treadle's own", "nobody offers"
            yield Explained(
                "kernels", name, f"{said} {', '.join(ops)}", _bids(offers[1:], refusals)
            )

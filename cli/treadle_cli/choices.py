"""Every choice that a start would make, with alternatives and reasons, for ``treadle serve --explain``.

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
from treadle.api.checkpoints import files_in
from treadle.api.communicators import CommunicatorOffer, CommunicatorRequest
from treadle.api.devices import device_info, dtype_name
from treadle.api.kinds import ATTENTION_BACKENDS, COMMUNICATORS, KERNEL_OPS, MODELS
from treadle.api.plugin_kind import FALLBACK
from treadle.config import EngineConfig, SchedulerConfig
from treadle.errors import PluginLoadError
from treadle.loading import fetch, parse_ref
from treadle.loading.formats import detect_format
from treadle.loading.matching import AUTO, NONE, Decision, choose_executor, decide
from treadle.plugins import PluginManager
from treadle.structured_output.manager import preferred_order
from treadle.text.assets import FrontendAssets, choose_renderer
from treadle.text.parser_plugins import PARSER_KINDS
from treadle_layers_kit import SingleRankCommunicator
from treadle_layers_kit.fusion import defer_all_reduce, kernel_sites
from treadle_worker_kit.attention import AttentionLayers
from treadle_worker_kit.build import empty_model, find_method, find_model
from treadle_worker_kit.device import pick_device
from treadle_worker_kit.model_config import (
    max_model_len,
    read_config,
    resolve_dtype,
    text_config,
)
from treadle_worker_kit.sampler_kernels import SAMPLER_OPS

__all__ = ("ConfigChoice", "explain", "matched_choice")


class ConfigChoice(msgspec.Struct, frozen=True):
    """One choice. ``alternatives`` are the names not taken, best first, each with its reason."""

    name: str
    choice: str
    reason: str
    alternatives: Sequence[tuple[str, str]] = ()


def explain(
    config: EngineConfig, plugins: PluginManager, assets: FrontendAssets
) -> Iterator[ConfigChoice]:
    """Yield what an engine would run. Raises what its start would raise."""
    yield from _text(config, plugins, assets)
    yield from _model(config, plugins)
    default = choose_executor(
        msgspec.structs.replace(config.device, distributed_executor_backend=AUTO), plugins
    )
    executor = choose_executor(config.device, plugins)
    yield _named_choice(plugins, "distributed-executor-backend", "executors", executor, default)
    policy, default = config.scheduler.scheduling_policy, SchedulerConfig().scheduling_policy
    yield _named_choice(plugins, "scheduling-policy", "scheduling_policies", policy, default)
    yield _structured_output(plugins, config.plugins.structured_output_backends)
    for option, kind in PARSER_KINDS.items():
        name = getattr(config.model, option) or NONE
        decision = decide(plugins, kind, assets.traits, name)
        yield matched_choice(plugins, option.replace("_", "-"), kind.name, decision)


def matched_choice(
    plugins: PluginManager, option: str, kind: str, decision: Decision
) -> ConfigChoice:
    """Return a choice made by matching the checkpoint's traits."""
    alternatives = [
        (c.key, f"{c.reason} (score {c.score})" if c.score else c.reason)
        for c in decision.alternatives
    ]
    choice = "none" if decision.key is None else _with_owner(plugins, kind, decision.key)
    return ConfigChoice(option, choice, decision.reason, alternatives)


def _with_owner(plugins: PluginManager, kind: str, key: str) -> str:
    """Return a key and the distribution that serves it, with the reason if it is not the only one."""
    entry = plugins.choose(kind, key)
    notes = ["as the fallback"] if entry.key == FALLBACK else []
    notes += ["pinned"] if f"{kind}:{key}" in plugins.switches.pins else []
    notes += ["an override"] if entry.override else []
    return f"{key} ({', '.join([entry.owner, *notes])})"


def _named_choice(
    plugins: PluginManager, option: str, kind: str, key: str, default: str
) -> ConfigChoice:
    """Return a choice made by the name in an option."""
    alternatives = [
        (name, f"taken with --{option} {name}") for name in plugins.keys(kind) if name != key
    ]
    reason = "the default" if key == default else f"--{option} {key}"
    return ConfigChoice(option, _with_owner(plugins, kind, key), reason, alternatives)


def _text(
    config: EngineConfig, plugins: PluginManager, assets: FrontendAssets
) -> Iterator[ConfigChoice]:
    model = config.model
    ref = parse_ref(model.model, model.revision, model.download_dir)
    source = _with_owner(plugins, "model_sources", ref.scheme)
    yield ConfigChoice("model-source", source, "the scheme of the model's name")
    if assets.tokenizer is None:
        yield ConfigChoice("tokenizer-mode", "none", "the checkpoint has no tokenizer files")
        return
    yield _named_choice(plugins, "tokenizer-mode", "tokenizers", model.tokenizer_mode, AUTO)
    yield matched_choice(
        plugins, "renderer", "renderers", choose_renderer(config, plugins, assets.traits)
    )


def _model(config: EngineConfig, plugins: PluginManager) -> Iterator[ConfigChoice]:
    model = config.model
    ref = parse_ref(model.model, model.revision, model.download_dir)
    files = fetch(plugins, ref, weights=False)
    _, hf_config = read_config(files, plugins, model.hf_overrides)
    device = pick_device(config.device.device)
    info = device_info(device)
    dtype = resolve_dtype(model.dtype, hf_config, info)
    architecture = find_model(plugins, hf_config).architecture
    alternatives = [
        (n, "no plugin serves it") for n in hf_config.architectures or () if n != architecture
    ]
    yield ConfigChoice(
        "architecture",
        _with_owner(plugins, "models", architecture),
        "config.json names it",
        alternatives,
    )
    yield _load_format(config, plugins, files.root)
    method = find_method(plugins, hf_config, model.quantization)
    yield matched_choice(plugins, "quantization", "quantization", method)
    reason = "detected by torch" if config.device.device == AUTO else "--device"
    yield ConfigChoice("device", f"{device} {info.name}".strip(), reason)
    reason = "the checkpoint's, as this device can run it" if model.dtype == AUTO else "--dtype"
    yield ConfigChoice("dtype", dtype_name(dtype), reason)
    yield from _layers(config, plugins, hf_config, info, dtype)


def _layers(
    config: EngineConfig,
    plugins: PluginManager,
    hf_config: Any,
    info: DeviceInfo,
    dtype: torch.dtype,
) -> Iterator[ConfigChoice]:
    """Yield the backends of the operations of the model's layers and of the sampler."""
    attention, recorder, meta = (
        AttentionLayers(config, plugins, info),
        OfferRecorder(plugins),
        torch.device("meta"),
    )
    ranks = SingleRankCommunicator()
    ranks.world_size = config.device.tensor_parallel_size  # build the shard of rank 0
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
        defer_all_reduce(model)
        asked = dict.fromkeys(
            (site.ops[0], tuple(site.sizes[0].items()))
            for site in kernel_sites(model)
            if site.install is not None
        )
        for op, sizes in asked:
            recorder.kernel(op, KernelRequest(info, dtype_name(dtype), dict(sizes)))
    except PluginLoadError as error:
        if error.plugin is None or not error.plugin.startswith(f"{MODELS.name}:"):
            raise
        # A model may allocate memory on its device while it is built.
        reason = f"the model cannot be built on the device meta: {error.__cause__}"
        yield ConfigChoice("attention-backend", "unknown", reason)
    for op in SAMPLER_OPS:
        shape = {"vocab_size": text_config(hf_config).vocab_size}
        recorder.kernel(op, KernelRequest(info, dtype_name(dtype), shape))
    if config.device.tensor_parallel_size > 1:
        yield _communicator(plugins, info, config.device.tensor_parallel_size)
    for group in attention.attention_groups:
        yield _attention(plugins, group.request, group.name, config.device.attention_backend)
    yield from recorder.rows()


def _load_format(config: EngineConfig, plugins: PluginManager, root: Any) -> ConfigChoice:
    option, load_format = "load-format", config.model.load_format
    if load_format != AUTO:
        return _named_choice(plugins, option, "load_formats", load_format, AUTO)
    detected = detect_format(files_in(root, ("*",), str(root)))
    if detected is None:
        return ConfigChoice(option, AUTO, "no weights are here yet: safetensors, if there are")
    alternatives = [
        (name, f"taken with --{option} {name}")
        for name in plugins.keys("load_formats")
        if name != detected
    ]
    return ConfigChoice(
        option,
        _with_owner(plugins, "load_formats", detected),
        "the format of the files",
        alternatives,
    )


def _attention(
    plugins: PluginManager, request: AttentionRequest, name: str, pin: str | None
) -> ConfigChoice:
    offers, refusals = plugins.offers(ATTENTION_BACKENDS, request=request)
    heads = f"{request.num_heads} heads of {request.head_size}, {request.num_kv_heads} of keys and values"
    window = f", window {request.window}" if request.window else ""
    reason = f"--attention-backend {pin}" if pin else f"the best offer ({offers[0].score})"
    alternatives = _offer_rows([o for o in offers if o.name != name], refusals)
    choice = _offer_owner(plugins, "attention_backends", name)
    return ConfigChoice("attention-backend", choice, f"{reason} for {heads}{window}", alternatives)


def _communicator(plugins: PluginManager, info: DeviceInfo, world_size: int) -> ConfigChoice:
    request = CommunicatorRequest(info, world_size)
    offers, refusals = plugins.offers(COMMUNICATORS, request=request)
    choice = (
        _offer_owner(plugins, "communicators", offers[0].name) if offers else "torch.distributed"
    )
    reason = f"the best offer ({offers[0].score})" if offers else "no backend offers"
    return ConfigChoice("communicator", choice, reason, _offer_rows(offers[1:], refusals))


def _offer_owner(plugins: PluginManager, kind: str, name: str) -> str:
    """Return a backend with its owner; only the name if it offers under another name than its key."""
    return _with_owner(plugins, kind, name) if name in plugins.keys(kind) else name


def _offer_rows(
    offers: Sequence[AttentionOffer | KernelOffer | CommunicatorOffer], refusals: Sequence[Refusal]
) -> list[tuple[str, str]]:
    alternatives = [(offer.name, f"offers with score {offer.score}") for offer in offers]
    return alternatives + [(refusal.name, "; ".join(refusal.reasons)) for refusal in refusals]


def _structured_output(plugins: PluginManager, backends: Sequence[str]) -> ConfigChoice:
    names = list(backends) or preferred_order(plugins)
    if not names:
        return ConfigChoice(
            "structured-output-backends", "none", "no structured output backend is installed"
        )
    reason = "--structured-output-backends" if backends else "the best of those that are installed"
    alternatives = [(name, "used for requests that those before it refuse") for name in names[1:]]
    return ConfigChoice(
        "structured-output-backends",
        _with_owner(plugins, "structured_output", names[0]),
        reason,
        alternatives,
    )


class OfferRecorder:
    """Stand-in for the plugin manager that records the offers for kernel ops and creates no kernel."""

    def __init__(self, plugins: PluginManager) -> None:
        self._plugins = plugins
        self._offers: dict[str, tuple[list[KernelOffer], list[Refusal]]] = {}

    def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None:
        answers = self._plugins.offers(KERNEL_OPS, op=op, request=request)
        # If layers of several sizes use an op, keep the first size that a backend offers for.
        if op not in self._offers or not self._offers[op][0]:
            self._offers[op] = answers
        return None

    def rows(self) -> Iterator[ConfigChoice]:
        """Yield one choice for all ops with the same offers and refusals."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for op, (offers, refusals) in self._offers.items():
            key = (
                tuple((o.name, o.score) for o in offers),
                tuple((r.name, r.reasons) for r in refusals),
            )
            groups.setdefault(key, []).append(op)
        for ops in groups.values():
            offers, refusals = self._offers[ops[0]]
            if offers:
                name = _offer_owner(self._plugins, "kernel_ops", offers[0].name)
                reason = f"the best offer ({offers[0].score}) for"
            else:
                name, reason = "treadle's own", "no backend offers"
            yield ConfigChoice(
                "kernels", name, f"{reason} {', '.join(ops)}", _offer_rows(offers[1:], refusals)
            )

"""The attention layers of a model that is being built: their backends, and the tensors of the paged cache."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import replace

import torch

from treadle.api.attention import AttentionBackend, AttentionOffer, AttentionRequest
from treadle.api.cache import DeviceInfo, KVCacheSpec
from treadle.api.kinds import ATTENTION_BACKENDS
from treadle.config import EngineConfig
from treadle.errors import ConfigError, PluginNotFoundError
from treadle.known_plugins import install_hint, known_distributions
from treadle.plugins import PluginManager
from treadle.runner.attention import AttentionGroup
from treadle_layers_kit import Attention
from treadle_worker_kit.device import torch_dtype

__all__ = ("AttentionLayers", "attention_offer")

LARGE_PAGE = 2 << 20
"""Bytes of a large page of the system."""


def attention_offer(
    plugins: PluginManager, request: AttentionRequest, pin: str | None = None
) -> AttentionOffer:
    """Return the best offer, or that of the backend ``pin``, behind the boundary.

    Raises ``PluginNotFoundError`` with every refusal, and what could be installed, if there is
    none, ``ConfigError`` if the pinned backend refuses.
    """
    offer = plugins.best_offer(ATTENTION_BACKENDS, pin, request=request)
    if offer is not None:
        return offer
    _, refusals = plugins.offers(ATTENTION_BACKENDS, pin, request=request)
    if pin is not None:
        reasons = "; ".join(r for refusal in refusals for r in refusal.reasons)
        offers, _ = plugins.offers(ATTENTION_BACKENDS, request=request)
        raise ConfigError(
            f"attention_backend is {pin!r}, which cannot serve this model: "
            f"{reasons or 'it made no offer'}; backends that can: "
            f"{', '.join(offer.name for offer in offers) or 'none'}"
        )
    reasons = "".join(f"\n  {r.name}: {'; '.join(r.reasons)}" for r in refusals)
    installed = {entry.dist for entry in plugins.entries}
    distributions = known_distributions(ATTENTION_BACKENDS.name)
    missing = [dist for dist in distributions if dist not in installed]
    hint = f"\n  not installed: {', '.join(missing)}; {install_hint(*missing)}" if missing else ""
    raise PluginNotFoundError(
        f"no attention backend can serve this model:{reasons or ' none is installed'}{hint}"
    )


class AttentionLayers:
    """The attention layers of a model, registered while it is built, and their paged cache.

    Layers of the same cache kind and window share page tables (a *KV cache group*). Layers with
    the same request share a backend and its metadata (an *attention group*).
    """

    def __init__(self, config: EngineConfig, plugins: PluginManager, device: DeviceInfo) -> None:
        self.page_size = config.cache.page_size
        self.attention_groups: list[AttentionGroup] = []
        self.cache_groups: list[tuple[str, int | None]] = []
        self.specs: dict[str, tuple[KVCacheSpec, AttentionGroup]] = {}
        self._config = config
        self._plugins = plugins
        self._device = device

    def register(self, request: AttentionRequest, spec: KVCacheSpec) -> AttentionBackend:
        """Register an attention layer and return its backend. Raises ``ConfigError``."""
        kv_dtype = self._config.cache.kv_cache_dtype
        spec = replace(spec, dtype=spec.dtype if kv_dtype == "auto" else kv_dtype)
        request = replace(
            request, device=self._device, kv_dtype=spec.dtype, page_size=self.page_size
        )
        group = next((g for g in self.attention_groups if g.request == request), None)
        if group is None:
            group = self._create_group(request, spec)
        self.specs[spec.layer] = (spec, group)
        return group.backend

    def _create_group(self, request: AttentionRequest, spec: KVCacheSpec) -> AttentionGroup:
        offer = attention_offer(self._plugins, request, self._config.device.attention_backend)
        if self.page_size is None:
            self.page_size = offer.page_sizes[0]
            request = replace(request, page_size=self.page_size)
        if self.page_size not in offer.page_sizes:
            raise ConfigError(
                f"page_size is {self.page_size}; attention backend {offer.name!r} allows "
                f"{', '.join(map(str, offer.page_sizes))}"
            )
        key = (spec.kind, spec.window)
        if key not in self.cache_groups:
            self.cache_groups.append(key)
        group = AttentionGroup(
            request, offer.create(), self.cache_groups.index(key), offer.graph_safe, offer.name
        )
        self.attention_groups.append(group)
        return group

    @property
    def names(self) -> str:
        return ", ".join(sorted({group.name for group in self.attention_groups}))

    @property
    def _size(self) -> int:
        if self.page_size is None:
            raise ConfigError("the model has no attention layers; treadle cannot run it yet")
        return self.page_size

    def page_bytes(self) -> list[int]:
        """Return the bytes of a page of each KV cache group, over all its layers."""
        totals = [0] * len(self.cache_groups)
        for spec, group in self.specs.values():
            shape = group.backend.kv_cache_shape(1, self._size, spec)
            totals[group.cache_group] += math.prod(shape) * torch_dtype(spec.dtype).itemsize
        return totals

    def allocate(self, pages: list[int], device: torch.device, model: torch.nn.Module) -> None:
        """Allocate the cache of every layer and set it in the model's attention modules.

        The cache is zeroed, since padding rows read it and must not read NaN.
        """
        for module in model.modules():
            if isinstance(module, Attention):
                spec, group = self.specs[module.spec.layer]
                shape = group.backend.kv_cache_shape(pages[group.cache_group], self._size, spec)
                module.cache = _zeros(shape, torch_dtype(spec.dtype), device)
                module.attn_group = self.attention_groups.index(group)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, pages of the system become resident when they are first written.

    A cache of many large pages lies on them: pages of 4 KiB are read at a third of the speed.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size, flags = math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=flags)
    if size >= 16 * LARGE_PAGE and hasattr(memory, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % LARGE_PAGE
    return whole[begin : begin + size].view(dtype).view(shape)

"""The pass that gives a loaded model its kernels, at the sites that its modules declare.

What was fused, and why not elsewhere, is in the ``FusionReport``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from treadle.api.attention import KernelOffer, KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.api.kinds import KERNEL_OPS
from treadle.plugins import PluginManager
from treadle_layers_kit.fusion import HasCollectiveOps, Kernel, Site, defer_all_reduce, kernel_sites

__all__ = ("FusionReport", "apply_fusions", "kernel_finder")

FindKernel = Callable[[str, KernelRequest], KernelOffer | None]
"""Returns the best offer for an operation; see ``kernel_finder``."""


@dataclass(slots=True)
class FusionReport:
    """Which plugin computes which operation, what was fused, and why not elsewhere."""

    backends: dict[str, str] = field(default_factory=dict)
    """By operation: the plugin whose kernel is used."""
    fused: dict[str, list[str]] = field(default_factory=dict)
    """By fusion (its operations): the paths of the modules."""
    separate: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By fusion: the paths of the modules that were left as they are, by reason."""

    def lines(self) -> Iterator[str]:
        """Yield lines for the start-up report; none without plugins."""
        if not self.backends:
            return
        backends = ", ".join(f"{op} by {name}" for op, name in self.backends.items())
        yield f"Kernels: {backends}."
        for fusion, paths in self.fused.items():
            text = f"Fused: {fusion} at {len(paths)} places"
            for reason, separate_paths in self.separate.get(fusion, {}).items():
                text += f"; not at {separate_paths[0]}" + f" and {len(separate_paths) - 1} more" * (
                    len(separate_paths) > 1
                )
                text += f": {reason}"
            yield f"{text}."


def kernel_finder(plugins: PluginManager) -> FindKernel:
    """Return a function that asks the installed plugins."""
    return lambda op, request: plugins.best_offer(KERNEL_OPS, op=op, request=request)


def try_kernels(model: nn.Module, find_kernel: FindKernel, device: DeviceInfo, dtype: str) -> None:
    """Load each kernel that ``apply_fusions`` may use, so that those that are tried are compiled."""
    tried = set()
    for site in kernel_sites(model):
        for op, sizes in zip(site.ops, site.sizes, strict=False):
            key = (op, *sorted(sizes.items()))
            if key not in tried and (offer := find_kernel(op, KernelRequest(device, dtype, sizes))):
                offer.load()
            tried.add(key)


def apply_fusions(
    model: nn.Module, find_kernel: FindKernel, device: DeviceInfo, dtype: str
) -> FusionReport:
    """Give each module the best kernel that is offered for it. Call it once the cache is allocated.

    Without an offer a module keeps its own operation. Collective: every rank calls it.
    """
    defer_all_reduce(model)
    report = FusionReport()
    kernel_cache: dict[tuple[str, tuple[tuple[str, int], ...]], Kernel | None] = {}

    def load(op: str, sizes: Mapping[str, int]) -> Kernel | None:
        key = (op, tuple(sorted(sizes.items())))
        if key not in kernel_cache:
            offer = find_kernel(op, KernelRequest(device, dtype, sizes))
            kernel_cache[key] = offer.load() if offer is not None else None
            if offer is not None:
                report.backends[op] = offer.name
        return kernel_cache[key]

    def kernels_of(site: Site) -> list[Kernel] | str:
        """All kernels, or why there are not all."""
        kernels = []
        for op, sizes in zip(site.ops, site.sizes, strict=True):
            kernel = load(op, sizes)
            if kernel is None:
                return f"no kernel is offered for {op}"
            kernels.append(kernel)
        return kernels

    # All sites first: a kernel that is installed changes what the next fusion would find.
    for site in kernel_sites(model):
        name = " + ".join(site.ops)
        result = kernels_of(site) if site.install is not None else site.reason
        if isinstance(result, str):
            report.separate.setdefault(name, {}).setdefault(result, []).append(site.path)
        elif site.install is not None:
            site.install(*result)
            if site.fuses:
                report.fused.setdefault(name, []).append(site.path)
    report.backends |= _install_collective_ops(model)
    return report


def _install_collective_ops(model: nn.Module) -> dict[str, str]:
    """Return the communicator's name by operation."""
    installed: dict[str, str] = {}
    shared_kernels: dict[tuple[Any, ...], Kernel | None] = {}
    for module in model.modules():
        if isinstance(module, HasCollectiveOps):
            installed |= module.install_collective_ops(shared_kernels)
    return installed

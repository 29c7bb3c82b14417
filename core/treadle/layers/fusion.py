"""The pass that gives a loaded model its kernels: declared replacements and fusions.

A replacement is a kernel for one operation of one module. A fusion is a kernel for what several modules
compute. Both are declared in ``treadle.layers.fusion_patterns``: which operations, and where a model has
them. What was fused, and why not elsewhere, is in the ``FusionReport``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import nn

from treadle.api.attention import KernelOffer, KernelRequest
from treadle.api.cache import DeviceInfo
from treadle.layers.collective_ops import install_collective_ops
from treadle.layers.fusion_patterns import (
    FUSIONS,
    REPLACEMENTS,
    Fusion,
    Kernel,
    Site,
    defer_all_reduce,
)

__all__ = ("FusionReport", "Kernels", "apply_fusions")


class Kernels(Protocol):
    """The part of the plugin host that is used here."""

    def kernel(self, op: str, request: KernelRequest) -> KernelOffer | None: ...


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
        yield "kernels      " + ", ".join(f"{op}: {name}" for op, name in self.backends.items())
        for fusion, paths in self.fused.items():
            text = f"fused        {fusion} at {len(paths)} places"
            for reason, left in self.separate.get(fusion, {}).items():
                text += f"; not at {left[0]}" + f" and {len(left) - 1} more" * (len(left) > 1)
                text += f": {reason}"
            yield text


def apply_fusions(
    model: nn.Module, plugins: Kernels, device: DeviceInfo, dtype: str
) -> FusionReport:
    """Give each module the best kernel that is offered for it. Call it once the cache is allocated.

    Without an offer a module keeps its own operation. Collective: every rank calls it.
    """
    defer_all_reduce(model)
    report = FusionReport()
    loaded: dict[tuple[str, tuple[tuple[str, int], ...]], Kernel | None] = {}

    def load(op: str, sizes: Mapping[str, int]) -> Kernel | None:
        key = (op, tuple(sorted(sizes.items())))
        if key not in loaded:
            offer = plugins.kernel(op, KernelRequest(device, dtype, sizes))
            loaded[key] = offer.load() if offer is not None else None
            if offer is not None:
                report.backends[op] = offer.name
        return loaded[key]

    def kernels_of(fusion: Fusion, site: Site) -> list[Kernel] | str:
        """All kernels, or why there are not all."""
        kernels = []
        for op, sizes in zip(fusion.ops, site.sizes, strict=True):
            kernel = load(op, sizes)
            if kernel is None:
                return f"no kernel is offered for {op}"
            kernels.append(kernel)
        return kernels

    # All sites first: a kernel that is installed changes what the next fusion would find.
    sites = [(fusion, list(fusion.find(model))) for fusion in (*REPLACEMENTS, *FUSIONS)]
    for fusion, found in sites:
        name = " + ".join(fusion.ops)
        for site in found:
            result = kernels_of(fusion, site) if site.install is not None else site.reason
            if isinstance(result, str):
                report.separate.setdefault(name, {}).setdefault(result, []).append(site.path)
            elif site.install is not None:
                site.install(*result)
                if fusion in FUSIONS:
                    report.fused.setdefault(name, []).append(site.path)
    report.backends |= install_collective_ops(model)
    return report

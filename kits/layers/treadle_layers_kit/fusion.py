"""Where a model's kernels go: replacements and fusions, declared by its modules.

A replacement is a kernel for one operation of one module. A fusion is a kernel for what several modules
compute. The modules themselves say where they have either (``HasKernelSites``), so that whoever installs
kernels knows no layer by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

__all__ = (
    "DefersAllReduce",
    "HasCollectiveOps",
    "HasKernelSites",
    "Kernel",
    "Site",
    "defer_all_reduce",
    "kernel_sites",
)

Kernel = Callable[..., Any]


class Site(NamedTuple):
    """A place in a model for the kernels of ``ops``, or the ``reason`` why they cannot go there.

    The operations, declared in ``treadle_layers_kit.kernel_ops``, are used together or not at all.
    """

    path: str
    ops: tuple[str, ...]
    sizes: tuple[Mapping[str, int], ...] = ()
    """``KernelRequest.shape`` for each operation."""
    install: Callable[..., None] | None = None
    """Called with the kernel of each operation."""
    fuses: bool = False
    """Whether it is a fusion, which takes precedence over replacements."""
    reason: str = ""


@runtime_checkable
class HasKernelSites(Protocol):
    """A module with operations that kernels may take the place of."""

    def kernel_sites(self, path: str) -> Iterator[Site]:
        """Yield the sites of the module itself, not of its children. ``path`` is its own."""


@runtime_checkable
class HasCollectiveOps(Protocol):
    """A module with operations between ranks that its communicator may have a kernel for."""

    def install_collective_ops(
        self, shared: dict[tuple[Any, ...], Kernel | None]
    ) -> Mapping[str, str]:
        """Install what the communicator has; return its name by operation. Collective.

        ``shared`` is one for the whole model: modules keep there what others may use, too.
        """


@runtime_checkable
class DefersAllReduce(Protocol):
    """A module that may leave sums over ranks to a later module, which has a kernel for them."""

    def defer_all_reduce(self) -> None: ...


def kernel_sites(model: nn.Module) -> list[Site]:
    """Return the sites of all modules, those of fusions last."""
    sites = [
        site
        for path, module in model.named_modules()
        if isinstance(module, HasKernelSites)
        for site in module.kernel_sites(path)
    ]
    return sorted(sites, key=lambda site: site.fuses)


def defer_all_reduce(model: nn.Module) -> None:
    """Let modules move the sum over ranks that ends a linear layer into the norm that reads the result."""
    for module in model.modules():
        if isinstance(module, DefersAllReduce):
            module.defer_all_reduce()

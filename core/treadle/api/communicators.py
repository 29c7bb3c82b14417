"""The contract of communicators: what the ranks that share one model send each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from treadle.api.cache import DeviceInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = (
    "Communicator",
    "CommunicatorOffer",
    "CommunicatorRequest",
    "FusedOp",
    "SupportsDryRun",
    "SupportsFusedOps",
)


class Communicator(Protocol):
    """The ranks that share one model. With one rank every operation returns its argument.

    Every method is collective: all ranks call it in the same order with the same shapes. Whatever one
    rank decides and others must know (that a kernel works, say) goes through ``all_reduce_min`` first.
    """

    rank: int
    world_size: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of this rank's device that the communicator has allocated."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks. May work in place; use the returned tensor."""

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the ranks' tensors along ``dim``, in rank order."""

    def all_reduce_min(self, values: Sequence[int]) -> list[int]:
        """Return the smallest value of any rank, for each position. Ranks agree on sizes by it.

        A rendezvous on the host: no rank returns before all have called it, and none waits for a device.
        """


class FusedOp(Protocol):
    """A fused operation of a communicator. It must be capturable in a CUDA graph."""

    def run(self, *args: Any) -> Any:
        """Return the result, or ``None`` if the arguments are not supported, the same on every rank."""


@runtime_checkable
class SupportsFusedOps(Protocol):
    """An optional ability of a communicator: operations that are more than one sum or gather."""

    name: str
    """The plugin, for the start-up report."""

    def create_fused_op(self, op: str, size: int, dtype: torch.dtype) -> FusedOp | None:
        """Return one of ``treadle_layers_kit.kernel_ops.COMMUNICATOR_OPS`` for rows of ``size`` elements.

        ``None`` if it is not supported. Collective: the ranks must agree before any of them waits for
        another one. What is returned is checked before it is used.
        """


@runtime_checkable
class SupportsDryRun(Protocol):
    """An optional ability of a communicator: kernels are compiled before ranks meet in them.

    A kernel that waits for other ranks must not run while one of them is compiling, or has failed to: it
    would wait for minutes, or for ever.
    """

    def set_dry_run(self, enabled: bool) -> None:
        """While it is ``enabled``, no operation waits for other ranks. Not collective.

        Each compiles and loads the kernels that it would launch, and returns a result of the right shape
        and type, whose values are finite. A fused operation refuses the same arguments as otherwise.
        """


@dataclass(frozen=True, slots=True)
class CommunicatorRequest:
    """The ranks of one model: all have a device of this kind."""

    device: DeviceInfo
    world_size: int


@dataclass(frozen=True, slots=True)
class CommunicatorOffer:
    """A communicator that can serve the request, and how well (0 to 100).

    ``create`` gets the communicator over ``torch.distributed`` and this rank's device. It is called on
    all ranks at once, and may send by the former. What it returns may pass calls on to it. If it raises
    on one rank, all ranks do without it: it must not leave others waiting then.
    """

    name: str
    score: int
    create: Callable[[Communicator, torch.device], Communicator]

"""The contract of model architectures and of quantization schemes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from treadle.api.attention import AttentionBackend, AttentionRequest, Step
    from treadle.api.cache import LayerCacheSpec
    from treadle.api.communicators import Communicator

__all__ = (
    "Capability",
    "CausalModel",
    "ExpertsMethod",
    "ExpertsSpec",
    "GatedMethod",
    "LinearMethod",
    "LinearSpec",
    "ModelContext",
    "ModelSpec",
    "QuantizationScheme",
    "TensorNames",
)


class Capability(enum.Flag):
    """What a model can be asked to do; anything else is refused before it is built."""

    GENERATE = enum.auto()
    EMBED = enum.auto()
    LORA = enum.auto()
    IMAGES = enum.auto()
    AUDIO = enum.auto()


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Everything a model may use while it is being built.

    Layers of ``treadle.layers`` take it as their first argument, so a model file passes it on and
    names neither paging, quantization nor parallelism.
    """

    hf_config: Any
    dtype: torch.dtype
    device: torch.device
    ranks: Communicator
    quantization: QuantizationScheme | None
    attention: Callable[[AttentionRequest, LayerCacheSpec], AttentionBackend]
    """Registers one attention layer and returns the backend that serves it."""
    max_model_len: int | None = None
    """The longest sequence that the engine admits; rotary scalings depend on it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the model plugin."""


class CausalModel(Protocol):
    """A decoder. Both methods run under ``torch.inference_mode``."""

    def forward(self, input_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` for ``[tokens]`` ids of several sequences.

        ``step`` is handed on to the attention layers. Where ``step.wanted`` names tokens, a model may
        return the states of those only, ``[len(step.wanted), hidden]``.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[rows, vocab]`` logits (all ranks return all of the vocabulary)."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model architecture as data."""

    architecture: str
    build: Callable[[ModelContext], CausalModel]
    """Returns a ``torch.nn.Module`` that is also a ``CausalModel``, with empty parameters."""
    capabilities: Capability = Capability.GENERATE
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our parameter's module name → the checkpoint's names that are stacked in it, in order."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint name prefix → our prefix (``"language_model.model." → "model."``), the first that
    fits; before that, wherever it stands, what begins with a dot (``".moe." → ".mlp."``)."""
    ignored: tuple[str, ...] = ()
    """Glob patterns of checkpoint tensors that the architecture does not use."""


# ----------------------------------------------------------------------- quantization


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear layer after tensor-parallel partitioning.

    ``out_features`` has one entry for each checkpoint matrix that is fused into the layer.
    ``prefix`` is our module path; ``names`` are the paths of those matrices in the checkpoint.
    """

    prefix: str
    names: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    bias: bool
    dtype: torch.dtype


class LinearMethod(Protocol):
    """How one kind of linear layer stores its weight and multiplies by it."""

    def create(self, module: nn.Module, spec: LinearSpec) -> None:
        """Register the parameters that the checkpoint fills, made by ``treadle.layers.weight``."""

    def finish(self, module: nn.Module) -> None:
        """Called once when all parameters are filled: repack, convert, free."""

    def apply(self, module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ W.T + bias``; ``x`` is ``[..., in_features]``."""


@runtime_checkable
class GatedMethod(LinearMethod, Protocol):
    """A ``LinearMethod`` that takes the activation of a gated feed-forward layer along.

    Worth having where the method reads its input an extra time, to quantize it.
    """

    def apply_gated(self, module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """``apply`` to ``silu(first half) · second half`` of ``x`` ``[..., 2 · in_features]``."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of one layer after tensor-parallel partitioning: gated MLPs of one shape.

    ``prefix`` is our module path; ``names`` are the paths of the first expert's gate, up and down
    matrices in the checkpoint. ``intermediate_size`` is this rank's share.
    """

    prefix: str
    names: tuple[str, ...]
    experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype


class ExpertsMethod(Protocol):
    """How the experts of one layer store their weights and multiply by them."""

    def create(self, module: nn.Module, spec: ExpertsSpec) -> None:
        """Register stacked parameters, made by ``treadle.layers.weight`` with ``stack``.

        Their names are ``gate_up_LEAF`` (of ``2 · intermediate_size`` output features) and
        ``down_LEAF``, where ``LEAF`` is the last component of the checkpoint's names.
        """

    def finish(self, module: nn.Module) -> None:
        """Called once when all parameters are filled: repack, convert, free."""

    def apply(
        self, module: nn.Module, x: Tensor, chosen: Tensor, op: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """``[tokens, k, hidden]``: ``down(op(gate_up(x)))`` of each token's ``k`` experts.

        ``x`` is ``[tokens, hidden]``, ``chosen`` int64 ``[tokens, k]``; ``op`` halves the last
        dimension. The result is this rank's part of a sum over the ranks.
        """


class QuantizationScheme(Protocol):
    """What a checkpoint's ``quantization_config`` means for its layers."""

    name: str

    def linear(self, spec: LinearSpec) -> LinearMethod | None:
        """The method for one layer, or ``None`` where the checkpoint left it unquantized."""

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod | None:
        """The method for the experts of one layer, or ``None``: they are left unquantized, or the
        scheme has no such method. A layer tells these apart by asking ``linear`` for a matrix, and
        builds linear layers for each expert in the latter case."""

    def kv_dtype(self, layer: str) -> str | None: ...


@runtime_checkable
class TensorNames(Protocol):
    """An optional ability of a scheme whose checkpoints name tensors in a way of their own."""

    def rename(self, name: str) -> str | None:
        """The usual name of a checkpoint tensor (``….q_proj.k_scale`` → ``….attn.k_scale``), or
        ``None`` for one that is not needed. Called before ``ModelSpec.renamed`` and ``fused``."""

"""The interfaces of model architectures and quantization schemes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from treadle.api.attention import AttentionBackend, AttentionRequest, ForwardContext
    from treadle.api.cache import KVCacheSpec
    from treadle.api.communicators import Communicator

__all__ = (
    "CausalModel",
    "ExpertsMethod",
    "ExpertsSpec",
    "LinearMethod",
    "LinearSpec",
    "ModelContext",
    "ModelSpec",
    "QuantizationScheme",
    "SupportsGatedInput",
    "SupportsWeightRenaming",
)


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What a model needs to be built.

    It is the first argument of layers, so that model code need not deal
    with paging, quantization or parallelism.
    """

    hf_config: Any
    dtype: torch.dtype
    device: torch.device
    tp_group: Communicator
    quantization: QuantizationScheme | None
    register_attention: Callable[[AttentionRequest, KVCacheSpec], AttentionBackend]
    """Registers an attention layer and returns its backend."""
    max_model_len: int | None = None
    """Maximum sequence length of the engine. RoPE scalings depend on it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the model plugin."""


class CausalModel(Protocol):
    """A decoder. Both methods run under ``torch.inference_mode``."""

    def forward(self, input_ids: Tensor, positions: Tensor, forward_ctx: ForwardContext) -> Tensor:
        """Return hidden states ``[tokens, hidden]`` for ``[tokens]`` ids of several sequences.

        ``forward_ctx`` is the forward context, for the attention layers. If it has logits indices, a model
        may return the states of these tokens only.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[rows, vocab]`` of the whole vocabulary, on every rank."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model architecture as data."""

    architecture: str
    build: Callable[[ModelContext], CausalModel]
    """Returns a ``torch.nn.Module`` that is also a ``CausalModel``, with empty parameters."""
    packed_modules_mapping: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module name of a fused layer → names of its parts in the checkpoint, in order."""
    weight_prefix_map: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint prefix → model prefix (``"language_model.model." → "model."``); the first match
    applies. Keys that begin with a dot (``".moe." → ".mlp."``) are replaced anywhere, and first."""
    ignored_weights: tuple[str, ...] = ()
    """Glob patterns of checkpoint tensors that the architecture does not use."""


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer of one rank, after tensor-parallel sharding.

    ``out_features`` has an entry for each checkpoint matrix fused into the layer. ``prefix`` is the
    module's path in the model, ``names`` are the paths of the matrices in the checkpoint.
    """

    prefix: str
    names: tuple[str, ...]
    in_features: int
    out_features: tuple[int, ...]
    bias: bool
    dtype: torch.dtype


class LinearMethod(Protocol):
    """Creates, post-processes and applies the weights of a linear layer."""

    def create_weights(self, module: nn.Module, spec: LinearSpec) -> None:
        """Register the parameters to load, created with ``treadle_layers_kit.weight``."""

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Post-process the loaded parameters: repack, convert, free. Called once."""

    def apply(self, module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ W.T + bias``; ``x`` is ``[..., in_features]``."""


@runtime_checkable
class SupportsGatedInput(LinearMethod, Protocol):
    """A ``LinearMethod`` that can include the preceding activation of a gated MLP.

    This helps methods that quantize their input, which they read anyway.
    """

    def apply_gated(self, module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply to ``silu(first half) · second half`` of ``x`` (``[..., 2 · in_features]``)."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of a layer on one rank, after tensor-parallel sharding: gated MLPs.

    ``prefix`` is the module's path in the model; ``names`` are the paths of the first expert's
    gate, up and down matrices in the checkpoint. ``intermediate_size`` is that of the shard.
    """

    prefix: str
    names: tuple[str, ...]
    experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype


class ExpertsMethod(Protocol):
    """Creates, post-processes and applies the weights of a layer's experts."""

    def create_weights(self, module: nn.Module, spec: ExpertsSpec) -> None:
        """Register stacked parameters, created with ``treadle_layers_kit.weight`` and ``stack``.

        Their names are ``gate_up_LEAF`` (of ``2 · intermediate_size`` output features) and
        ``down_LEAF``, where ``LEAF`` is the last component of the checkpoint's names.
        """

    def process_weights_after_loading(self, module: nn.Module) -> None:
        """Post-process the loaded parameters: repack, convert, free. Called once."""

    def apply(
        self, module: nn.Module, x: Tensor, topk_ids: Tensor, activation: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return ``down(activation(gate_up(x)))`` of each token's ``k`` experts, ``[tokens, k, hidden]``.

        ``x`` is ``[tokens, hidden]``, ``topk_ids`` int64 ``[tokens, k]``; ``activation``, the activation,
        halves the last dimension. The result must still be summed over the ranks.
        """


class QuantizationScheme(Protocol):
    """The meaning of a checkpoint's ``quantization_config`` for its layers."""

    name: str

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        """Return the method of a layer, or ``None`` if it is not quantized."""

    def experts_method(self, spec: ExpertsSpec) -> ExpertsMethod | None:
        """Return the method of a layer's experts.

        ``None`` if they are not quantized, or if the scheme has no such method. In the second case
        ``linear_method`` returns a method for each expert's matrices, which become linear layers.
        """

    def kv_cache_dtype(self, layer: str) -> str | None: ...


@runtime_checkable
class SupportsWeightRenaming(Protocol):
    """Optional protocol of a scheme for checkpoints with unusual tensor names."""

    def rename(self, name: str) -> str | None:
        """Return the usual name of a checkpoint tensor, or ``None`` if it is not needed.

        Example: ``….q_proj.k_scale`` → ``….attn.k_scale``. Applied before ``ModelSpec``'s maps.
        """

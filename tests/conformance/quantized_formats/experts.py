"""The experts of one layer from packed tensors, filled by the loader as in a whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from quantized_formats.loaded import InMemory, as_loaded
from treadle.api.cache import DeviceInfo
from treadle.api.kinds import QUANTIZATION
from treadle.api.models import ModelContext, ModelSpec, SupportsWeightRenaming
from treadle.plugins import PluginManager
from treadle.testing.packing import Format
from treadle_layers_kit import Experts, SingleRankCommunicator, ops
from treadle_worker_kit.weights import load_weights

__all__ = ("PackedLayer", "choices")

HOME = "model.layers.0.mlp.experts"


def choices(tokens: int, k: int, experts: int, last: int = 0) -> Tensor:
    """int64 ``[tokens, k]``, no two of a token the same; the ``last`` experts are nobody's choice."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts - last, generator=generator).topk(k).indices


@dataclass(frozen=True)
class PackedLayer:
    """Experts in a format. ``online``: the checkpoint is in full, and this method quantizes it."""

    format: Format | None
    experts: int
    hidden: int
    inner: int
    online: str = ""

    def tensors(self) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        """The checkpoint's by name, and the dequantized matrices float32 ``[experts, out, in]`` by name."""
        generator = torch.Generator().manual_seed(self.hidden)
        wide, deep = (self.inner, self.hidden), (self.hidden, self.inner)
        shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": deep}
        stored, dense = {}, {}
        for name, shape in shapes.items():
            matrices = []
            for expert in range(self.experts):
                # Small enough for the static scales of formats, which cut activations off beyond 9, also those of "down".
                size = (1 + expert) / 8 / shape[1] ** 0.5
                weight = torch.randn(shape, generator=generator) * size
                tensors = {"weight": weight}
                if self.format is not None:
                    packed = self.format.pack(weight)
                    tensors, weight = dict(packed.tensors), packed.weight
                stored |= {f"{HOME}.{expert}.{name}.{leaf}": t for leaf, t in tensors.items()}
                matrices.append(weight)
            dense[name] = torch.stack(matrices)
        return stored, dense

    def load(
        self,
        dtype: torch.dtype,
        target: DeviceInfo,
        *,
        device: str = "cpu",
        tp_group: Any = None,
        change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    ) -> Experts:
        """One rank's, for ``target`` with tensors on ``device``. ``change`` edits the checkpoint."""
        config = {} if self.format is None else self.format.config()
        scheme = PluginManager().create(
            QUANTIZATION, self.online or config["quant_method"], checkpoint=config, device=target
        )
        tp_group = tp_group or SingleRankCommunicator()
        context = ModelContext(
            hf_config=SimpleNamespace(),
            dtype=dtype,
            device=torch.device(device),
            tp_group=tp_group,
            quantization=scheme,
            register_attention=lambda request, spec: None,  # type: ignore[arg-type,return-value]
        )
        with torch.device(device):
            built = Experts(context, HOME, self.experts, self.hidden, self.inner)
        root: nn.Module = built
        for part in reversed(HOME.split(".")):
            outer = nn.Module()
            outer.add_module(part, root)
            root = outer
        stored, _ = self.tensors()
        tensors = stored if self.format is None else as_loaded(self.format, stored)
        change(tensors)
        rename = scheme.rename if isinstance(scheme, SupportsWeightRenaming) else None
        spec = ModelSpec("layer", lambda context: root)
        load_weights(root, spec, InMemory(tensors), tp_group, rename=rename)
        return built

    def expected(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        """float32 ``[tokens, k, hidden]`` of the dequantized matrices."""
        _, dense = self.tensors()
        rows = []
        for row, chosen in zip(x.float(), topk_ids.tolist(), strict=True):
            for expert in chosen:
                gate, up = (dense[name][expert] @ row for name in ("gate_proj", "up_proj"))
                inner = ops.silu_and_mul(torch.cat((gate, up)))
                rows.append(dense["down_proj"][expert] @ inner)
        return torch.stack(rows).view(*topk_ids.shape, self.hidden)

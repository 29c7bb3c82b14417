"""What the ``quantization_config`` of Quark means for the layers of a model."""

from __future__ import annotations

from treadle.api.cache import DeviceInfo
from treadle.api.models import LinearMethod, LinearSpec
from treadle_fp8_kit.scaled_mm import ScaledMM
from treadle_layers_kit.affine import AffineLinear, RoundedAffineLinear
from treadle_layers_kit.schemes import LinearScheme, stored_alike
from treadle_layers_kit.small_floats import Fp4Linear, Fp8Linear
from treadle_quark.config import FP4, FP8, Config

__all__ = ("QuarkScheme",)

# Scales of activations, which stay in the model's type or have one for each row, and of what is not cached.
UNUSED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "q_scale")
CACHED = ("k_proj", "v_proj", "qkv_proj")


class QuarkScheme(LinearScheme):
    """Also ``SupportsWeightRenaming``: scales of activations are not read."""

    name = "quark"

    def __init__(self, config: Config, device: DeviceInfo) -> None:
        self.config = config
        self._cuda = device.type == "cuda"
        self._scaled_mm = ScaledMM(device)

    def linear_method(self, spec: LinearSpec) -> LinearMethod | None:
        weights = stored_alike(spec, self.config.weights)
        if weights is None:
            return None
        if weights.dtype == FP4:
            return Fp4Linear(weights.group, "weight")
        if weights.dtype != FP8 and weights.bits == 8 and weights.inputs is not None:
            return RoundedAffineLinear(weights.group, weights.inputs, self._scaled_mm)
        if weights.dtype != FP8:
            return AffineLinear(weights.bits, weights.group, cuda=self._cuda)
        fp8 = self._scaled_mm if weights.rounds_inputs else None
        if weights.scheme == "per_block":
            return Fp8Linear("block", weights.block, fp8)
        scales = "tensor" if weights.scheme == "per_tensor" else "channel"
        return Fp8Linear(scales, product=fp8)  # type: ignore[arg-type]

    def rename(self, name: str) -> str | None:
        path, _, leaf = name.rpartition(".")
        if leaf == "output_scale" and path.endswith(CACHED):
            return name
        return None if leaf in UNUSED else name

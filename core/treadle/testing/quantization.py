"""The conformance suite of quantization plugins: a quantized layer computes with the dequantized weight.

::

    class TestMine(PluginSuite, QuantizationSuite):
        plugin = "quantization:mine"
        formats = {"groups of 32": MineFormat(32)}     # see treadle.testing.packing
        refused = {"bits": ({"bits": 5}, "5 bits")}

Every layer is filled by the loader itself from tensors packed by the format's rules, so that shapes,
dtypes, fused matrices and the shares of ranks are those of real checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.cache import DeviceInfo
from treadle.api.kinds import QUANTIZATION
from treadle.errors import CheckpointError, TreadleError
from treadle.testing.plugin import PluginTest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from treadle.api.communicators import Communicator
    from treadle.api.models import QuantizationScheme
    from treadle.testing.linears import Layer, QuantizedLinear
    from treadle.testing.packing import Format

__all__ = ("QuantizationSuite",)

ROWS = ((1,), (5,), (2, 3), (70,), (0,))


class QuantizationSuite(PluginTest):
    """Subclass it with ``formats``; the key is the ``quant_method``."""

    formats: ClassVar[Mapping[str, Format]]
    """Variants of the checkpoint format, by name."""
    refused: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {}
    """By name: changes of the first format's configuration that must be refused, and words that
    the error must have."""
    device: ClassVar[DeviceInfo] = DeviceInfo("cpu")
    tolerance: ClassVar[Mapping[str, float]] = {
        "float32": 1e-4,
        "float16": 4e-3,
        "bfloat16": 1.5e-2,
    }
    """What ``||y - reference|| / ||reference||`` may be, by dtype."""
    model: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 128,
    }
    """A tiny Llama whose shares for two ranks every format can pack."""

    # -- building ------------------------------------------------------------------------

    @property
    def layers(self) -> Mapping[str, Layer]:
        from treadle.testing.linears import Layer

        return {
            "plain": Layer(256, (128,)),
            "bias": Layer(128, (64,), bias=True),
            "fused": Layer(128, (128, 64, 32), bias=True),
            "narrow": Layer(128, (32, 32)),
        }

    @property
    def shared(self) -> Mapping[str, Layer]:
        """Layers for two ranks."""
        from treadle.testing.linears import Layer

        return {
            "columns": Layer(128, (256,), bias=True, split="column"),
            "fused columns": Layer(128, (512, 256, 256), split="column"),
            "rows": Layer(512, (128,), bias=True, split="row"),
            "rows inside groups": Layer(384, (128,), split="row"),
        }

    def scheme(self, config: Mapping[str, Any]) -> QuantizationScheme:
        return self.plugin_manager().create(
            QUANTIZATION, self.key, checkpoint=config, device=self.device
        )

    def load(
        self,
        format: Format,
        layer: Layer,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        tp_group: Communicator | None = None,
    ) -> QuantizedLinear:
        from treadle.testing.linears import fill

        scheme = self.scheme(format.config())
        return fill(scheme, layer, tensors, dtype, tp_group=tp_group, device=self.device.type)

    def inputs(self, layer: Layer, dtype: torch.dtype, *rows: int) -> Tensor:
        import torch

        x = torch.randn(*rows, layer.inputs, generator=torch.Generator().manual_seed(7))
        return x.to(self.device.type, dtype)

    def check(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, label: str) -> None:
        """Compare with ``x @ weight.T + bias``."""
        expected = x.float().cpu() @ weight.t()
        expected = expected if bias is None else expected + bias
        assert y.dtype == x.dtype and y.shape == expected.shape, label
        if not y.numel():
            return
        error = float((y.float().cpu() - expected).norm() / expected.norm())
        limit = self.tolerance[str(x.dtype).removeprefix("torch.")]
        assert error <= limit, f"{label}: relative error {error:.2e} is over {limit:.0e}"

    # -- one layer -------------------------------------------------------------------------

    def test_every_layer_is_its_dequantized_weight(self) -> None:
        import torch

        from treadle.api.models import SupportsGatedInput
        from treadle.testing.linears import pack

        for title, format in self.formats.items():
            for name, layer in self.layers.items():
                tensors, weight, bias = pack(format, layer)
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    linear = self.load(format, layer, tensors, dtype)
                    for rows in ROWS:
                        x = self.inputs(layer, dtype, *rows)
                        label = f"{title}, {name}, {dtype}, {list(rows)} rows"
                        with torch.inference_mode():
                            self.check(linear(x), x, weight, bias, label)
                            if isinstance(linear.method, SupportsGatedInput):
                                # No larger than ``x``, for which static scales are made.
                                wide_input = torch.cat((torch.ones_like(x), x), dim=-1)
                                y = linear.gated(wide_input)
                                x = torch.nn.functional.silu(torch.ones_like(x)) * x
                                self.check(y, x, weight, bias, f"{label}, gated")

    def test_the_format_is_a_lossy_one(self) -> None:
        """Otherwise the comparisons would pass for a plugin that never reads the packed values."""
        import torch

        from treadle.testing.linears import pack

        layer = self.layers["plain"]
        full = torch.cat(list(layer.weights().values()))
        for title, format in self.formats.items():
            error = (pack(format, layer)[1] - full).norm() / full.norm()
            assert 1e-3 < error < 0.7, title

    def test_inputs_may_lie_apart(self) -> None:
        import torch

        from treadle.testing.linears import pack

        layer = self.layers["plain"]
        for title, format in self.formats.items():
            tensors, weight, _ = pack(format, layer)
            linear = self.load(format, layer, tensors, torch.float32)
            wide_input = self.inputs(layer, torch.float32, 4, 2)
            with torch.inference_mode():
                y = linear(wide_input[:, 1])
            self.check(y, wide_input[:, 1], weight, None, title)

    def test_weights_stay_small(self) -> None:
        """Post-processed weights need clearly less memory than in bfloat16."""
        import torch

        from treadle.testing.linears import Layer, pack

        layer = Layer(512, (512,))
        for title, format in self.formats.items():
            linear = self.load(format, layer, pack(format, layer)[0], torch.bfloat16)
            tensors = [*linear.parameters(), *linear.buffers()]
            size = sum(t.numel() * t.element_size() for t in tensors)
            assert size < 0.75 * 2 * 512 * 512, title

    def test_what_is_missing_is_named(self) -> None:
        """Remove a tensor of one matrix of a layer, and one of all matrices."""
        import torch

        from treadle.testing.linears import pack

        layer = self.layers["fused"]
        for title, format in self.formats.items():
            tensors = pack(format, layer)[0]
            leaves = {name.rpartition(".")[2] for name in tensors} - {"bias", *format.optional}
            for leaf in leaves:
                for suffix in (f"b_proj.{leaf}", f".{leaf}"):
                    rest = {n: t for n, t in tensors.items() if not n.endswith(suffix)}
                    with pytest.raises(CheckpointError) as raised:
                        self.load(format, layer, rest, torch.float32)
                    assert "b_proj" in str(raised.value), f"{title}, without {leaf}"

    # -- ranks -----------------------------------------------------------------------------

    def test_ranks_share_a_layer(self) -> None:
        import torch

        from treadle.testing.linears import pack
        from treadle.testing.ranks import run_on_ranks

        for title, format in self.formats.items():
            for name, layer in self.shared.items():
                tensors, weight, bias = pack(format, layer)
                x = self.inputs(layer, torch.float32, 3)
                for rank, y in enumerate(run_on_ranks(2, self._half(format, layer, tensors, x))):
                    rows = slice(None) if layer.split == "row" else layer.shares(rank, 2)
                    rank_bias = None if bias is None else bias[rows]
                    self.check(y, x, weight[rows], rank_bias, f"{title}, {name}, rank {rank} of 2")

    def _half(
        self, format: Format, layer: Layer, tensors: Mapping[str, Tensor], x: Tensor
    ) -> Callable[[Communicator], Tensor]:
        def work(tp_group: Communicator) -> Tensor:
            linear = self.load(format, layer, tensors, x.dtype, tp_group)
            rank_input = (
                x.chunk(2, dim=1)[tp_group.rank].contiguous() if layer.split == "row" else x
            )
            y: Tensor = linear(rank_input)
            return y

        return work

    # -- the configuration -----------------------------------------------------------------

    def test_layers_that_are_left_alone(self) -> None:
        """Layers are excluded by their names, by those of fused matrices, and by whole components only."""
        import torch

        from treadle.api.models import LinearSpec

        def spec(*names: str, prefix: str | None = None) -> LinearSpec:
            full_prefix = prefix or names[0]
            return LinearSpec(full_prefix, names, 128, (64,) * len(names), False, torch.float32)

        module = "model.layers.1.mlp"
        gate, up, down = (f"{module}.{n}_proj" for n in ("gate", "up", "down"))
        fused = spec(gate, up, prefix=f"{module}.gate_up_proj")
        for title, format in self.formats.items():
            scheme = self.scheme(format.config([gate, up, f"{module}.router"]))
            for skipped in (fused, spec(gate), spec(f"{module}.router")):
                assert scheme.linear_method(skipped) is None, title
            for quantized in (spec(down), spec("model.layers.11.mlp.up_proj")):
                assert scheme.linear_method(quantized) is not None, title
            with pytest.raises(TreadleError, match="up_proj"):
                self.scheme(format.config([gate])).linear_method(fused)
            assert self.scheme(format.config()).linear_method(spec("lm_head")) is None, title

    def test_two_layers_share_nothing(self) -> None:
        import torch

        from treadle.api.models import LinearSpec

        scheme = self.scheme(next(iter(self.formats.values())).config())
        spec = LinearSpec("a", ("a",), 128, (64,), False, torch.float32)
        assert scheme.linear_method(spec) is not scheme.linear_method(spec)

    def test_it_answers_for_experts_and_caches(self) -> None:
        """``None`` means that the scheme does not support them."""
        import torch

        from treadle.api.models import ExpertsSpec

        names = tuple(f"model.layers.0.mlp.experts.0.{n}_proj" for n in ("gate", "up", "down"))
        spec = ExpertsSpec("model.layers.0.mlp.experts", names, 4, 256, 256, torch.float32)
        for title, format in self.formats.items():
            scheme = self.scheme(format.config())
            method = scheme.experts_method(spec)
            assert method is None or hasattr(method, "apply"), title
            kv_dtype = scheme.kv_cache_dtype("model.layers.0.self_attn.attn")
            assert kv_dtype is None or isinstance(kv_dtype, str), title

    def test_what_it_cannot_read_is_refused(self) -> None:
        base = next(iter(self.formats.values())).config()
        for name, (changes, message) in self.refused.items():
            try:
                self.scheme({**base, **changes})
            except TreadleError as error:
                assert message in str(error), name
            else:
                pytest.fail(f"{name}: {changes} was taken")

    # -- a model ---------------------------------------------------------------------------

    def checkpoints(self, folder: Path, format: Format) -> tuple[Path, Path]:
        """A tiny Llama, quantized except for one layer, and the same model dequantized."""
        from treadle.testing.checkpoints import make_checkpoint
        from treadle.testing.packing import pack_checkpoint

        source = make_checkpoint(folder / "source", **self.model)
        packed, plain = folder / "packed", folder / "plain"
        pack_checkpoint(source, packed, plain, format, ("1.mlp.down_proj",))
        return packed, plain

    def test_a_model_is_its_dequantized_self(self, tmp_path: Path) -> None:
        """Compare on one rank, on two ranks, and in bfloat16."""
        import torch

        from treadle.testing.models import TinyModel
        from treadle.testing.ranks import run_on_ranks

        plugins = self.plugin_manager()
        if not any(e.id == "models:LlamaForCausalLM" for e in plugins.entries):
            pytest.skip("needs treadle-llama")
        ids = torch.randint(0, 256, (12,), generator=torch.Generator().manual_seed(5))
        for index, (title, format) in enumerate(self.formats.items()):
            packed, plain = self.checkpoints(tmp_path / str(index), format)
            expected = TinyModel(plain, plugins).logits(ids)
            actual = TinyModel(packed, plugins).logits(ids)
            assert (actual - expected).abs().max() < 1e-3, title

            def work(tp_group: Communicator, folder: Path = packed) -> Tensor:
                return TinyModel(folder, plugins, tp_group=tp_group).logits(ids)

            for logits in run_on_ranks(2, work):
                assert (logits - expected).abs().max() < 1e-3, f"{title}, two ranks"
            half = TinyModel(packed, plugins, dtype=torch.bfloat16).logits(ids)
            assert (half - expected).norm() < 0.1 * expected.norm(), f"{title}, bfloat16"

"""Mixtures of experts: routing, the three ways to multiply, ranks, names, quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treadle.api.communicators import Communicator
from treadle.api.models import ExpertsSpec, LinearSpec, ModelContext, ModelSpec
from treadle.errors import CheckpointError, ConfigError
from treadle.testing.ranks import run_on_ranks
from treadle_layers_kit import Experts, MoE, SingleRankCommunicator, WeightTarget, ops
from treadle_layers_kit.experts import LinearExperts
from treadle_layers_kit.plain import PlainLinear
from treadle_layers_kit.plain_experts import (
    PlainExperts,
    dense_experts,
    fused_experts,
    gathered_experts,
    grouped_experts,
)
from treadle_worker_kit.weights import load_weights, to_checkpoint_name, to_model_name

Context = Callable[..., ModelContext]
HIDDEN, INNER, EXPERTS, CHOSEN = 32, 24, 6, 2
RANDOM = torch.Generator().manual_seed(3)
X = torch.randn(9, HIDDEN, generator=RANDOM)
MATRICES = {
    f"{e}.{name}.weight": torch.randn(shape, generator=RANDOM) / shape[1] ** 0.5
    for e in range(EXPERTS)
    for name, shape in {
        "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)
    }.items()
}  # fmt: skip
GATE = torch.randn(EXPERTS, HIDDEN, generator=RANDOM)


class Tensors:
    """A weight loader of a dict."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.entries = tensors

    def tensors(self, should_load: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, x) for name, x in self.entries.items() if should_load(name))


def checkpoint() -> dict[str, Tensor]:
    return {f"mlp.experts.{n}": x for n, x in MATRICES.items()} | {"mlp.gate.weight": GATE}


def moe(
    ctx: ModelContext, tensors: dict[str, Tensor] | None = None, **options: Any
) -> Callable[[Tensor], Tensor]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MoE(
                ctx, "mlp", hidden_size=HIDDEN, intermediate_size=INNER,
                experts=EXPERTS, top_k=CHOSEN, **options,
            )  # fmt: skip

    model = Model()
    spec = ModelSpec("Test", build=lambda _: model)
    load_weights(model, spec, Tensors(tensors or checkpoint()), ctx.tp_group)
    return model.mlp


def by_hand(x: Tensor, normalised: bool = True) -> Tensor:
    """One token and one expert at a time."""
    rows = []
    for token in x:
        scores = (GATE @ token).softmax(-1)
        best = sorted(range(EXPERTS), key=lambda e: -float(scores[e]))[:CHOSEN]
        total = sum(float(scores[e]) for e in best) if normalised else 1.0
        row = torch.zeros(HIDDEN)
        for e in best:
            gate, up, down = (
                MATRICES[f"{e}.{n}.weight"] for n in ("gate_proj", "up_proj", "down_proj")
            )
            row += float(scores[e]) / total * (down @ (F.silu(gate @ token) * (up @ token)))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_it_is_a_weighted_sum_of_the_best_experts(context: Context, norm_topk_prob: bool) -> None:
    layer = moe(context(), norm_topk_prob=norm_topk_prob)
    expected = by_hand(X, norm_topk_prob)
    torch.testing.assert_close(layer(X), expected, atol=1e-5, rtol=0)
    for row in range(len(X)):  # and no token depends on the others
        actual = layer(X[row : row + 1])
        torch.testing.assert_close(actual, expected[row : row + 1], atol=1e-5, rtol=0)
    assert layer(X[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("k", [1, 3, EXPERTS])
def test_the_ways_to_multiply_agree(tokens: int, k: int) -> None:
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=RANDOM) / 6
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=RANDOM) / 5
    chosen = torch.rand(tokens, EXPERTS, generator=RANDOM).topk(k).indices
    expected = torch.stack(
        [torch.stack([down[e] @ ops.silu_and_mul(gate_up[e] @ x) for e in row])
         for x, row in zip(X, chosen.tolist(), strict=False)]
    )  # fmt: skip
    for way in (grouped_experts, gathered_experts, dense_experts):
        y = way(X[:tokens], chosen, gate_up, down, lambda x, _: ops.silu_and_mul(x), lambda x, _: x)
        torch.testing.assert_close(y, expected, atol=1e-5, rtol=0, msg=way.__name__)


@pytest.mark.parametrize("bias", [False, True])
def test_a_kernel_computes_all_products(
    context: Context, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = checkpoint()
    if bias:
        tensors["mlp.gate.bias"] = torch.randn(EXPERTS, generator=RANDOM)
        for name, width in ("gate_up", 2 * INNER), ("down", HIDDEN):
            shifts = torch.randn(EXPERTS, width, generator=RANDOM)
            tensors[f"mlp.experts.{name}_proj_bias"] = shifts
    layer: Any = moe(context(), tensors, bias=bias)
    expected = layer(X)
    (site,) = (s for s in layer.experts.kernel_sites("mlp.experts") if "fused_experts" in s.ops)
    assert site.sizes == ({"in_features": HIDDEN, "intermediate_size": INNER},)
    given: list[tuple[Any, ...]] = []
    site.install(lambda *arguments: (given.append(arguments), fused_experts(*arguments))[1])
    torch.testing.assert_close(layer(X), expected, atol=1e-5, rtol=0)
    ((_, _, gate_up, down, *biases, activation),) = given
    assert gate_up is layer.experts.gate_up_weight and down is layer.experts.down_weight
    assert [b is not None for b in biases] == [bias] * 2 and activation is layer.experts.op
    monkeypatch.setattr("treadle_layers_kit.plain_experts.LONG", 2)
    torch.testing.assert_close(layer(X), expected, atol=1e-5, rtol=0)
    assert len(given) == 1, "many rows of an expert are multiplied by the vendor's product"


def test_only_chosen_experts_are_read(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    """Few rows must not cost a loop over all experts."""
    layer: Any = moe(context())
    calls: list[int] = []
    real = F.linear

    def counted(*args: Any) -> Tensor:
        calls.append(len(args[0]))
        return real(*args)

    monkeypatch.setattr("treadle_layers_kit.plain_experts.F.linear", counted)
    layer.experts(X[:1], torch.tensor([[4, 1]]), torch.tensor([[0.5, 0.5]]))
    assert calls == [1, 1, 1, 1]
    calls.clear()
    layer.experts(X[:3], torch.tensor([[4, 1], [1, 4], [4, 0]]), torch.ones(3, 2))
    assert calls == [1, 1, 2, 2, 3, 3]


def test_ranks_share_the_inner_features_of_every_expert(context: Context) -> None:
    expected = moe(context())(X)
    assert expected.abs().max() > 0.1

    def run(tp_group: Communicator) -> Tensor:
        layer: Any = moe(context(ranks=tp_group))
        assert layer.experts.gate_up_weight.shape == (
            EXPERTS,
            2 * INNER // tp_group.world_size,
            HIDDEN,
        )
        assert layer.experts.down_weight.shape == (EXPERTS, HIDDEN, INNER // tp_group.world_size)
        result: Tensor = layer(X)
        return result

    for size in (2, 4):
        for result in run_on_ranks(size, run):
            torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


def test_sizes_that_cannot_be_shared_are_refused(context: Context) -> None:
    class Five(SingleRankCommunicator):
        world_size = 5

    with pytest.raises(ConfigError, match=r"mlp\.experts has 24 features"):
        moe(context(ranks=Five()))
    with pytest.raises(ConfigError, match="7 of 6 experts"):
        MoE(
            context(), "mlp", hidden_size=32, intermediate_size=24, experts=6, top_k=7
        )  # fmt: skip


# ----------------------------------------------------------------------------- checkpoint names


def test_stacked_experts_load_as_well(context: Context) -> None:
    def stack(name: str) -> Tensor:
        return torch.stack([MATRICES[f"{e}.{name}.weight"] for e in range(EXPERTS)])

    stacked = {
        "mlp.gate.weight": GATE,
        "mlp.experts.gate_up_proj": torch.cat((stack("gate_proj"), stack("up_proj")), dim=1),
        "mlp.experts.down_proj": stack("down_proj"),
    }
    assert torch.equal(moe(context(), stacked)(X), moe(context())(X))
    ranked = run_on_ranks(2, lambda ranks: moe(context(ranks=ranks), stacked)(X))
    torch.testing.assert_close(ranked[0], by_hand(X), atol=1e-5, rtol=0)


def test_what_is_missing_or_too_much_is_named(context: Context) -> None:
    tensors = checkpoint()
    del tensors["mlp.experts.3.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"mlp\.experts\.gate_up_weight \(of 3\)"):
        moe(context(), tensors)
    for name in ("6.up_proj.weight", "0.up_proj.scale", "0.side_proj.weight", "x.up_proj.weight"):
        tensors = checkpoint() | {f"mlp.experts.{name}": MATRICES["0.up_proj.weight"]}
        with pytest.raises(CheckpointError, match=f"without a parameter.*{name}"):
            moe(context(), tensors)


def test_names_within_names() -> None:
    renamed = {".block_sparse_moe.": ".mlp.", "language_model.": ""}
    checkpoint_name = "language_model.model.layers.3.block_sparse_moe.gate.weight"
    assert to_model_name(checkpoint_name, renamed) == "model.layers.3.mlp.gate.weight"
    assert to_checkpoint_name("model.layers.3.mlp.gate.weight", renamed) == checkpoint_name


# --------------------------------------------------------------------------------- quantization


class Scheme:
    """Quantizes ``linear_method`` layers whose names contain ``skipped``."""

    name = "half"

    def __init__(self, skipped: str, method: Any = None) -> None:
        self.skipped, self.method = skipped, method
        self.specs: list[ExpertsSpec] = []

    def linear_method(self, spec: LinearSpec) -> Any:
        return PlainLinear() if self.skipped in spec.names[0] else None

    def experts_method(self, spec: ExpertsSpec) -> Any:
        self.specs.append(spec)
        return self.method

    def kv_cache_dtype(self, layer: str) -> None:
        return None


def experts(ctx: ModelContext) -> Experts:
    return Experts(ctx, "mlp.experts", EXPERTS, HIDDEN, INNER, names=("w1", "w3", "w2"))


@pytest.mark.parametrize("matrix", ["w1", "w2", "w3"])
def test_a_scheme_without_experts_has_linear_layers(context: Context, matrix: str) -> None:
    layer = experts(context(quantization=Scheme(f".{matrix}")))
    assert isinstance(layer.method, LinearExperts)
    assert layer.locate("4.w3.weight") == WeightTarget("4.gate_up.weight", 1)
    assert layer.locate("4.w2.weight") == WeightTarget("4.down.weight")
    for unknown in ("4.w2.scales", "9.w2.weight", "down_proj", "w2.weight"):
        assert layer.locate(unknown) is None, unknown


def test_a_scheme_that_leaves_experts_alone_is_not(context: Context) -> None:
    scheme = Scheme("attention")
    assert isinstance(experts(context(quantization=scheme)).method, PlainExperts)
    assert scheme.specs[0].names == ("mlp.experts.0.w1", "mlp.experts.0.w3", "mlp.experts.0.w2")


def test_a_scheme_with_a_method_for_experts(context: Context) -> None:
    class Doubled(PlainExperts):
        """Its checkpoint has halves."""

        finished = 0

        def process_weights_after_loading(self, module: nn.Module) -> None:
            self.finished += 1
            module.get_parameter("gate_up_weight").data.mul_(2)
            module.get_parameter("down_weight").data.mul_(2)

    method = Doubled()
    halves = {name: x / 2 if ".experts." in name else x for name, x in checkpoint().items()}
    layer = moe(context(quantization=Scheme("experts", method)), halves)
    torch.testing.assert_close(layer(X), by_hand(X), atol=1e-5, rtol=0)
    assert method.finished == 1


def test_the_leaf_of_a_name_names_the_parameter(context: Context) -> None:
    layer = experts(context())
    assert layer.locate("4.w3.weight") == WeightTarget("gate_up_weight", 1, 4)
    assert layer.locate("4.w2.weight") == WeightTarget("down_weight", None, 4)
    assert layer.locate("4.w2.scales") is None
    layer.register_parameter("down_scales", nn.Parameter(torch.zeros(EXPERTS, HIDDEN)))
    assert layer.locate("4.w2.scales") == WeightTarget("down_scales", None, 4)

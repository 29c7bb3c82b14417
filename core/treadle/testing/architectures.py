"""The conformance suite of model architectures: the same numbers as transformers, however computed.

::

    class TestMine(PluginSuite, ModelSuite):
        plugin = "models:MyForCausalLM"
        variants = {"plain": {}, "tied": {"tie_word_embeddings": True}}
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.checkpoints import read_json
from treadle.api.kinds import MODELS
from treadle.testing.plugin import PluginTest

if TYPE_CHECKING:
    from torch import Tensor

    from treadle.api.communicators import Communicator
    from treadle.testing.models import TinyModel

__all__ = ("ModelSuite",)

LENGTH = 45


class ModelSuite(PluginTest):
    """Runs tiny random checkpoints that transformers writes; the key is the architecture."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {}}
    """Changes of ``treadle.testing.checkpoints.TINY``, by name; the first is used for most checks."""
    ranks: ClassVar[int] = 2
    """Devices that the model is divided over; 1 if it cannot be."""
    tolerance: ClassVar[float] = 2e-4

    def checkpoint(self, folder: Path, **changes: Any) -> Path:
        """Write a tiny checkpoint. Override it for sizes that ``tiny_config`` does not reach."""
        from treadle.testing.checkpoints import make_checkpoint, tiny_config

        config = tiny_config(self.key, **changes)
        if config.get_text_config() is not config:
            # Parts that keep their default sizes would be billions of parameters.
            pytest.skip("the configuration has parts; override checkpoint and make them tiny")
        return make_checkpoint(folder, self.key, **changes)

    def model(
        self, folder: Path, tp_group: Communicator | None = None, **options: Any
    ) -> TinyModel:
        from treadle.testing.models import TinyModel

        return TinyModel(folder, self.plugin_manager(), tp_group=tp_group, **options)

    @cached_property
    def ids(self) -> Tensor:
        import torch

        return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(5))

    def close(self, actual: Tensor, expected: Tensor) -> None:
        import torch

        torch.testing.assert_close(actual, expected, rtol=self.tolerance, atol=self.tolerance)

    @pytest.fixture
    def plain(self, tmp_path: Path) -> Path:
        return self.checkpoint(tmp_path / "plain", **next(iter(self.variants.values())))

    def test_the_spec_names_its_architecture(self) -> None:
        assert (
            self.plugin_manager().create(MODELS, self.key, hf_config=None).architecture == self.key
        )

    def test_logits_are_those_of_transformers(self, tmp_path: Path) -> None:
        from treadle.testing.models import transformers_logits

        for name, changes in self.variants.items():
            folder = self.checkpoint(tmp_path / name.replace(" ", "_"), **changes)
            self.close(self.model(folder).logits(self.ids), transformers_logits(folder, self.ids))

    def test_a_configuration_that_it_reads_is_that_of_transformers(self, tmp_path: Path) -> None:
        """With ``treadle_model_config``: every field has the value that transformers gives it."""
        from transformers import CONFIG_MAPPING

        manager = self.plugin_manager()
        options = manager.options(MODELS.name, self.key)
        read = manager.hooks_for(MODELS.name, self.key).treadle_model_config
        for name, changes in self.variants.items():
            folder = self.checkpoint(tmp_path / name.replace(" ", "_"), **changes)
            raw = read_json(folder, "config.json")
            fields = read(architecture=self.key, config=deepcopy(raw), options=options)
            if fields is not None:
                config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
                expected = {field: getattr(config, field, None) for field in fields}
                expected["dtype"] = config.dtype and str(config.dtype).removeprefix("torch.")
                assert fields == expected

    @pytest.mark.parametrize(
        "chunks", [[1] * LENGTH, [7, 20, 18], [44, 1]], ids=["decode", "chunks", "last"]
    )
    def test_steps_add_up_to_one_prefill(self, plain: Path, chunks: list[int]) -> None:
        model = self.model(plain)
        self.close(model.logits(self.ids, chunks), model.logits(self.ids))

    def test_sequences_in_one_batch_do_not_meet(self, plain: Path) -> None:
        model = self.model(plain)
        parts = [self.ids[:9], self.ids[9:30], self.ids[30:]]
        chunks = [[len(part) - 1, 1] for part in parts]
        batched = model.batch(parts, chunks)
        for part, part_chunks, actual in zip(parts, chunks, batched, strict=True):
            self.close(actual, model.logits(part, part_chunks))

    def test_tokens_that_are_not_wanted_may_be_left_out(self, plain: Path) -> None:
        """A model may return only the rows in ``logits_indices``, or all rows."""
        import torch

        model = self.model(plain)
        expected = model.logits(self.ids)
        for indices in ([LENGTH - 1], [3, 20, 21], list(range(LENGTH))):
            actual = model.logits(self.ids, logits_indices=torch.tensor(indices))
            self.close(actual, expected[indices] if len(actual) == len(indices) else expected)

    def test_it_runs_in_bfloat16(self, plain: Path) -> None:
        """Every tensor that a layer creates has the dtype that the layer was built for."""
        import torch

        expected = self.model(plain).logits(self.ids)
        actual = self.model(plain, dtype=torch.bfloat16).logits(self.ids)
        # The median: rounding sends some tokens of a mixture to other experts.
        assert ((actual - expected).norm(dim=1) / expected.norm(dim=1)).median() < 0.1

    def test_quantization_is_asked_by_the_checkpoints_names(self, plain: Path) -> None:
        """Lists of layers that are left alone go by them."""
        from safetensors import safe_open

        from treadle.testing.models import RecordingScheme, TinyModel

        scheme: Any = RecordingScheme(self.plugin_manager())
        TinyModel(plain, scheme, quantization="asked")
        stored_names: set[str] = set()
        for file in plain.glob("*.safetensors"):
            with safe_open(file, "pt") as reader:
                tensors = reader.keys()
            stored_names.update(name.rpartition(".")[0] for name in tensors)
            stored_names.update(tensors)  # matrices in stacks have no name of their own
        # A head that is tied has no tensor of its own.
        assert {name for name in scheme.names if not name.endswith("head")} <= stored_names

    def test_two_models_share_nothing(self, plain: Path) -> None:
        import torch

        first, second = self.model(plain), self.model(plain)
        expected = first.logits(self.ids)
        with torch.no_grad():
            for parameter in second.model.parameters():
                parameter.zero_()
        self.close(first.logits(self.ids), expected)

    def test_every_layer_has_a_cache_of_its_own(self, plain: Path) -> None:
        model = self.model(plain)
        layers = [attention.spec.layer for attention in model.attentions]
        assert layers and len(set(layers)) == len(layers)

    def test_ranks_agree_with_one_device(self, plain: Path) -> None:
        from treadle.testing.ranks import run_on_ranks

        if self.ranks == 1:
            pytest.skip("it says that it cannot be divided")
        expected = self.model(plain).logits(self.ids)
        for actual in run_on_ranks(self.ranks, lambda r: self.model(plain, r).logits(self.ids)):
            self.close(actual, expected)

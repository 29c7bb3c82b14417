"""The conformance suite of logits processors.

::

    class TestMine(PluginSuite, LogitsProcessorSuite):
        plugin = "logits_processors:mine"
        arguments = [{"ngram": 2}]      # values of SamplingParams.extra_args["mine"] that it takes
        refused = [{"ngram": 0}]        # and some that it must refuse
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from treadle.api.engine import LogitsProcessor
from treadle.api.kinds import LOGITS_PROCESSORS
from treadle.errors import RequestError
from treadle.testing.plugin import PluginTest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("LogitsProcessorSuite",)


class LogitsProcessorSuite(PluginTest):
    """A processor refuses in ``check`` and never in ``apply``; rows know nothing of each other."""

    arguments: ClassVar[Sequence[Any]]
    refused: ClassVar[Sequence[Any]]
    vocab_size: ClassVar[int] = 64

    def build(self) -> LogitsProcessor:
        (made,) = [self.host().create(LOGITS_PROCESSORS, self.key, vocab_size=self.vocab_size)]
        return made

    def rows(self, count: int) -> tuple[Tensor, list[Any], list[list[int]]]:
        """Logits, arguments and histories of different lengths, some of which repeat."""
        import torch

        made = torch.Generator().manual_seed(count)
        logits = torch.randn(count, self.vocab_size, generator=made)
        given = [self.arguments[i % len(self.arguments)] for i in range(count)]
        tokens = [
            [(i * 7 + j % 3) % self.vocab_size for j in range(1 + 9 * i)] for i in range(count)
        ]
        return logits, given, tokens

    def test_two_builds_are_two_objects(self) -> None:
        assert self.build() is not self.build()

    def test_good_arguments_pass(self) -> None:
        processor = self.build()
        for arguments in self.arguments:
            processor.validate_params(arguments)

    def test_bad_arguments_are_the_requests_error(self) -> None:
        assert self.refused, "name some arguments that it refuses"
        processor = self.build()
        for arguments in self.refused:
            with pytest.raises(RequestError):
                processor.validate_params(arguments)

    @pytest.mark.parametrize("count", [1, 2, 5])
    def test_the_result_has_the_shape_of_the_logits(self, count: int) -> None:
        import torch

        logits, given, tokens = self.rows(count)
        out = self.build().apply(logits.clone(), given, tokens)
        assert out.shape == logits.shape and out.dtype == torch.float32
        assert out.device == logits.device
        assert not out.isnan().any(), "NaN is not a logit"

    def test_some_token_stays_allowed(self) -> None:
        logits, given, tokens = self.rows(5)
        out = self.build().apply(logits, given, tokens)
        assert out.isfinite().any(dim=1).all(), "a row allows no token: its request would fail"

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        import torch

        logits, given, tokens = self.rows(5)
        together = self.build().apply(logits.clone(), given, tokens)
        for row in range(5):
            part = logits[row : row + 1].clone()
            alone = self.build().apply(part, given[row : row + 1], tokens[row : row + 1])
            torch.testing.assert_close(alone[0], together[row])

    def test_the_order_of_the_rows_does_not_matter(self) -> None:
        """Rows change places between steps: what is kept by row belongs to somebody else."""
        import torch

        logits, given, tokens = self.rows(4)
        processor = self.build()
        forth = processor.apply(logits.clone(), given, tokens)
        back = processor.apply(logits.flip(0).clone(), given[::-1], tokens[::-1])
        torch.testing.assert_close(back.flip(0), forth)

    def test_arguments_and_histories_are_left_as_they_are(self) -> None:
        logits, given, tokens = self.rows(3)
        before = copy.deepcopy((given, tokens))
        processor = self.build()
        for arguments in given:
            with suppress(RequestError):
                processor.validate_params(arguments)
        processor.apply(logits, given, tokens)
        assert (given, tokens) == before

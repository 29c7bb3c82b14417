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
    """Checks that errors are raised in ``check``, not in ``apply``, and that rows are independent."""

    arguments: ClassVar[Sequence[Any]]
    refused: ClassVar[Sequence[Any]]
    vocab_size: ClassVar[int] = 64

    def build(self) -> LogitsProcessor:
        (processor,) = [
            self.plugin_manager().create(LOGITS_PROCESSORS, self.key, vocab_size=self.vocab_size)
        ]
        return processor

    def rows(self, count: int) -> tuple[Tensor, list[Any], list[list[int]]]:
        """Return logits, arguments and histories of different lengths, some with repeated tokens."""
        import torch

        generator = torch.Generator().manual_seed(count)
        logits = torch.randn(count, self.vocab_size, generator=generator)
        argument_list = [self.arguments[i % len(self.arguments)] for i in range(count)]
        tokens = [
            [(i * 7 + j % 3) % self.vocab_size for j in range(1 + 9 * i)] for i in range(count)
        ]
        return logits, argument_list, tokens

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

        logits, argument_list, tokens = self.rows(count)
        out = self.build().apply(logits.clone(), argument_list, tokens)
        assert out.shape == logits.shape and out.dtype == torch.float32
        assert out.device == logits.device
        assert not out.isnan().any(), "NaN is not a logit"

    def test_some_token_stays_allowed(self) -> None:
        logits, argument_list, tokens = self.rows(5)
        out = self.build().apply(logits, argument_list, tokens)
        assert out.isfinite().any(dim=1).all(), "a row allows no token: its request would fail"

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        import torch

        logits, argument_list, tokens = self.rows(5)
        batched = self.build().apply(logits.clone(), argument_list, tokens)
        for row in range(5):
            part = logits[row : row + 1].clone()
            single = self.build().apply(part, argument_list[row : row + 1], tokens[row : row + 1])
            torch.testing.assert_close(single[0], batched[row])

    def test_the_order_of_the_rows_does_not_matter(self) -> None:
        """Sequences change rows between steps, so state by row would belong to another sequence."""
        import torch

        logits, argument_list, tokens = self.rows(4)
        processor = self.build()
        forward = processor.apply(logits.clone(), argument_list, tokens)
        backward = processor.apply(logits.flip(0).clone(), argument_list[::-1], tokens[::-1])
        torch.testing.assert_close(backward.flip(0), forward)

    def test_arguments_and_histories_are_left_as_they_are(self) -> None:
        logits, argument_list, tokens = self.rows(3)
        before = copy.deepcopy((argument_list, tokens))
        processor = self.build()
        for arguments in argument_list:
            with suppress(RequestError):
                processor.validate_params(arguments)
        processor.apply(logits, argument_list, tokens)
        assert (argument_list, tokens) == before

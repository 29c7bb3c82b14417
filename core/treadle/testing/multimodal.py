"""The conformance suite of multimodal processors: as many features as places, and no surprises.

::

    class TestMine(PluginSuite, MultimodalSuite):
        plugin = "multimodal:LlavaForConditionalGeneration"
        items = [png(57, 28), png(600, 400)]    # what it takes, of several sizes
        refused = [b"GIF89a"]                   # and what it must refuse
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from treadle.api.engine import MultimodalProcessor
from treadle.api.files import ModelFiles
from treadle.api.kinds import MULTIMODAL_PROCESSORS
from treadle.errors import RequestError
from treadle.testing.plugin import PluginTest

__all__ = ("MultimodalSuite", "equal")


class MultimodalSuite(PluginTest):
    """An item is the same wherever it comes; the prompt has a place for each of its features."""

    items: ClassVar[Sequence[Any]]
    refused: ClassVar[Sequence[Any]]

    def files(self, folder: Path) -> ModelFiles:
        """The checkpoint that it is for; ``folder`` is empty and yours."""
        return ModelFiles(folder, (), {})

    def features(self, processed: Any) -> int:
        """How many positions of a prompt the value that ``process`` made of one item fills."""
        return len(processed)

    def open(self, folder: Path) -> MultimodalProcessor:
        return self.host().create(MULTIMODAL_PROCESSORS, self.key, files=self.files(folder))

    def test_two_builds_are_two_objects(self, tmp_path: Path) -> None:
        assert self.open(tmp_path) is not self.open(tmp_path)

    def test_there_is_a_value_for_each_item_in_order(self, tmp_path: Path) -> None:
        processor, items = self.open(tmp_path), list(self.items)
        assert len(items) > 1, "name some items of several sizes"
        alone = [processor.process([item])[0] for item in items]
        for chosen in ((), range(len(items)), range(len(items) - 1, -1, -1), (0, 0)):
            found = processor.process([items[i] for i in chosen])
            assert len(found) == len(chosen)
            assert equal(list(found), [alone[i] for i in chosen]), "an item depends on the others"

    def test_there_are_as_many_places_as_features(self, tmp_path: Path) -> None:
        processor = self.open(tmp_path)
        for item in self.items:
            places: Any = processor.placeholder_tokens(item)
            (processed,) = processor.process([item])
            assert isinstance(places, int) and places >= 1
            assert places == self.features(processed)

    def test_two_processors_agree(self, tmp_path: Path) -> None:
        """What one has made is used again where another would have made it."""
        first, second = self.open(tmp_path), self.open(tmp_path)
        made = [list(processor.process(list(self.items))) for processor in (first, second)]
        assert equal(*made)

    def test_items_are_left_as_they_are(self, tmp_path: Path) -> None:
        items = list(self.items)
        before = copy.deepcopy(items)
        self.open(tmp_path).process(items)
        assert equal(items, before)

    def test_bad_items_are_the_requests_error(self, tmp_path: Path) -> None:
        assert self.refused, "name some items that it refuses"
        processor = self.open(tmp_path)
        for item in self.refused:
            with pytest.raises(RequestError):
                processor.process([item])

    def test_bad_items_have_no_places(self, tmp_path: Path) -> None:
        """Places are counted before anything is processed."""
        processor = self.open(tmp_path)
        for item in self.refused:
            with pytest.raises(RequestError):
                processor.placeholder_tokens(item)


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same: numbers, texts, tensors, and what is made of them."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if hasattr(one, "tobytes") and hasattr(one, "shape"):  # of numpy
        same = (one.shape, one.dtype) == (other.shape, other.dtype)
        return same and bool(one.tobytes() == other.tobytes())
    if hasattr(one, "untyped_storage"):
        import torch

        return bool(one.dtype == other.dtype and torch.equal(one, other))
    return bool(one == other)

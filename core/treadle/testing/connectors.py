"""The conformance suite of KV connectors: what was saved comes back, and nothing else does.

::

    class TestMine(PluginSuite, KVConnectorSuite):
        plugin = "kv_connectors:mine"

        def memory(self, connector):            # without it, the bytes of pages are not checked
            connector.pool = torch.zeros(PAGES, 64)
            return connector.pool
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from treadle.api.cache import ConnectorRole, KVCacheLayout, KVCacheSpec
from treadle.api.engine import KVConnector
from treadle.api.kinds import KV_CONNECTORS
from treadle.testing.plugin import PluginTest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ("PAGES", "PAGE_SIZE", "FakeRequest", "KVConnectorSuite")

PAGES = 8
PAGE_SIZE = 4


@dataclass(frozen=True)
class FakeRequest:
    """A request as a connector sees it."""

    id: str
    tokens: list[int]

    @classmethod
    def new(cls, count: int) -> FakeRequest:
        """With a prompt that no run of the tests has had before: a store may outlive them."""
        draw = random.SystemRandom()
        return cls(f"{draw.getrandbits(64):x}", [draw.randrange(32000) for _ in range(count)])

    def but(self, tokens: list[int]) -> FakeRequest:
        """Another request."""
        return FakeRequest(f"{self.id}-", tokens)


class KVConnectorSuite(PluginTest):
    """One connector saves, looks up and loads, as in an engine of one process."""

    def layout(self, dtype: str = "float32") -> KVCacheLayout:
        layers = (KVCacheSpec(f"model.layers.{i}.attn", 2, 8, dtype) for i in range(2))
        return KVCacheLayout(PAGE_SIZE, PAGES, tuple(layers))

    def build(
        self, layout: KVCacheLayout | None = None, role: ConnectorRole = ConnectorRole.WORKER
    ) -> KVConnector:
        return self.host().create(
            KV_CONNECTORS, self.key, role=role, layout=layout or self.layout()
        )

    def memory(self, connector: KVConnector) -> Tensor | None:
        """The memory that ``connector`` reads in ``save`` and writes in ``load``, ``[pages, …]``.

        The contract hands none over yet, so say how yours gets it.
        """
        return None

    @pytest.fixture
    def pool(self) -> tuple[KVConnector, Tensor]:
        connector = self.build()
        memory = self.memory(connector)
        if memory is None:
            pytest.skip("how its pages can be read is not said: override memory")
        return connector, memory

    @pytest.mark.parametrize("role", list(ConnectorRole))
    def test_each_role_gets_an_object_of_its_own(self, role: ConnectorRole) -> None:
        assert self.build(role=role) is not self.build(role=role)

    @pytest.mark.parametrize("role", list(ConnectorRole))
    def test_an_unknown_prompt_is_not_found(self, role: ConnectorRole) -> None:
        connector = self.build(role=role)
        for count in (1, PAGE_SIZE, 3 * PAGE_SIZE + 2):
            assert connector.get_num_matched_tokens(FakeRequest.new(count)) == 0

    def test_what_was_saved_is_found(self) -> None:
        connector, request = self.build(), FakeRequest.new(3 * PAGE_SIZE + 2)
        self.memory(connector)
        connector.save(request, [5, 0, 3])
        for again in (request, request.but(list(request.tokens))):
            assert connector.get_num_matched_tokens(again) == 3 * PAGE_SIZE

    def test_no_more_is_found_than_the_beginning_that_prompts_share(self) -> None:
        """Keys and values of a token depend on all tokens before it."""
        connector, saved = self.build(), FakeRequest.new(3 * PAGE_SIZE)
        self.memory(connector)
        connector.save(saved, [5, 0, 3])
        for same in range(3 * PAGE_SIZE):
            other = [*saved.tokens]
            other[same] += 1
            found = connector.get_num_matched_tokens(saved.but(other))
            assert found % PAGE_SIZE == 0 and found <= same, f"{found} of {same} common tokens"

    def test_no_more_is_found_than_the_prompt_has(self) -> None:
        connector, saved = self.build(), FakeRequest.new(3 * PAGE_SIZE)
        self.memory(connector)
        connector.save(saved, [5, 0, 3])
        for count in range(1, 3 * PAGE_SIZE):
            found = connector.get_num_matched_tokens(saved.but(saved.tokens[:count]))
            assert found % PAGE_SIZE == 0 and found <= count, f"{found} of {count} tokens"

    def test_pages_of_another_layout_are_not_found(self) -> None:
        """The same prompt in another precision is other bytes."""
        first, request = self.build(), FakeRequest.new(2 * PAGE_SIZE)
        self.memory(first)
        first.save(request, [1, 2])
        assert self.build(self.layout("bfloat16")).get_num_matched_tokens(request) == 0

    def test_loaded_pages_equal_the_saved_ones(self, pool: tuple[KVConnector, Tensor]) -> None:
        """Into other pages, after those that were saved hold something else."""
        connector, memory = pool
        first, second = FakeRequest.new(2 * PAGE_SIZE), FakeRequest.new(2 * PAGE_SIZE)
        self.fill(memory)
        connector.save(first, [1, 4])
        connector.save(second, [6, 2])
        saved = memory.clone()
        memory.zero_()
        connector.load(first, [7, 0])
        connector.load(second, [3, 1])
        assert self.rows(memory, 7, 0, 3, 1) == self.rows(saved, 1, 4, 6, 2)

    def test_other_pages_are_left_alone(self, pool: tuple[KVConnector, Tensor]) -> None:
        """A part of what was found is loaded, and nothing if nothing is asked for."""
        connector, memory = pool
        request = FakeRequest.new(3 * PAGE_SIZE)
        self.fill(memory)
        connector.save(request, [1, 4, 2])
        others = self.rows(memory, 0, 1, 2, 3, 4, 6, 7)
        connector.load(request, [])
        connector.load(request, [5])
        assert self.rows(memory, 0, 1, 2, 3, 4, 6, 7) == others

    def fill(self, memory: Tensor) -> None:
        """Give each element another value."""
        import torch

        memory.copy_(torch.arange(memory.numel()).view(memory.shape) % 251)

    def rows(self, memory: Tensor, *pages: int) -> list[object]:
        return [memory[page].tolist() for page in pages]

"""A connector that keeps pages in memory, and what may be wrong with one."""

from __future__ import annotations

from typing import Any

from mutants.specimen import Mutant, Specimen
from treadle.testing.connectors import PAGES, KVConnectorSuite

SOURCE = """
import functools
from treadle.api import impl

TREADLE = {"kv_connectors": ["mine"]}
KEPT = {}


class Mine:
    pool = None

    def __init__(self, layout, role):
        self.size = layout.page_size
        self.kept = {}

    def get_num_matched_tokens(self, request):
        ids = tuple(request.tokens)
        return max((len(k) for k in self.kept if k == ids[: len(k)]), default=0)

    def load(self, request, pages):
        for number, page in enumerate(pages):
            self.pool[page].copy_(self.kept[self.key(request, number)])

    def save(self, request, pages):
        for number, page in enumerate(pages):
            self.kept[self.key(request, number)] = self.pool[page].clone()

    def key(self, request, number):
        return tuple(request.tokens[: (number + 1) * self.size])


def build(layout, role):
    return Mine(layout, role)


@impl
def treadle_kv_connector(name, role, layout):
    return build(layout, role) if name == "mine" else None
"""


class Connector(KVConnectorSuite):
    def memory(self, connector: Any) -> Any:
        import torch

        connector.pool = torch.zeros(PAGES, 6)
        return connector.pool


SPECIMENS = (
    Specimen(
        suite=Connector,
        plugin="kv_connectors:mine",
        source=SOURCE,
        mutants=(
            Mutant(
                "test_each_role_gets_an_object_of_its_own",
                {"def build": "@functools.cache\ndef build"},
            ),
            Mutant(
                "test_an_unknown_prompt_is_not_found",
                {"self.kept = {}": 'self.kept = {} if role.value == "worker" else None'},
            ),
            Mutant(
                "test_what_was_saved_is_found",
                {
                    "ids = tuple(request.tokens)": "ids = (request.id, *request.tokens)",
                    "return tuple(request.tokens[": "return (request.id, *request.tokens[",
                    "(len(k) for": "(len(k) - 1 for",
                },
            ),
            Mutant(
                "test_no_more_is_found_than_the_beginning_that_prompts_share",
                {"k == ids[: len(k)]": "k[-2:] == ids[: len(k)][-2:]"},
            ),
            Mutant(
                "test_no_more_is_found_than_the_prompt_has",
                {"k == ids[: len(k)]": "k[: len(ids)] == ids[: len(k)]"},
            ),
            Mutant(
                "test_pages_of_another_layout_are_not_found", {"self.kept = {}": "self.kept = KEPT"}
            ),
            Mutant("test_loaded_pages_equal_the_saved_ones", {".clone()": ""}),
            Mutant(
                "test_other_pages_are_left_alone",
                {"self.pool[page].copy_": "self.pool[page : page + 2].copy_"},
            ),
        ),
    ),
)

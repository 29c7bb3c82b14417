"""A processor of lists of numbers, four to a feature, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import SHARED, Mutant, Specimen
from treadle.testing.multimodal import MultimodalSuite

SOURCE = """
from treadle.api import impl
from treadle.errors import RequestError

TREADLE = {"multimodal_processors": ["mine"]}


class Mine:
    def process(self, items):
        return [self.features(item) for item in items]

    def features(self, item):
        self.check(item)
        return [sum(item[start : start + 4]) for start in range(0, len(item), 4)]

    def placeholder_tokens(self, item):
        self.check(item)
        return -(-len(item) // 4)

    def check(self, item):
        if not item:
            raise RequestError("the item is empty", param="messages")


@impl
def treadle_multimodal_processor(architecture):
    return Mine() if architecture == "mine" else None
"""


class Multimodal(MultimodalSuite):
    items = ([5, 6, 7, 8, 9], [1], [3] * 12)
    refused = ([],)


SPECIMENS = (
    Specimen(
        suite=Multimodal,
        plugin="multimodal_processors:mine",
        source=SOURCE,
        mutants=(
            Mutant("test_two_builds_are_two_objects", SHARED),
            Mutant(
                "test_there_is_a_value_for_each_item_in_order",
                {"for item in items]": "for item in sorted(items)]"},
            ),
            Mutant(
                "test_there_are_as_many_places_as_features", {"-(-len(item) // 4)": "len(item)"}
            ),
            Mutant("test_two_processors_agree", {"[sum(": "[id(self) + sum("}),
            Mutant(
                "test_items_are_left_as_they_are",
                {"for item in items]": "for item in (items.pop(0) for _ in items[:])]"},
            ),
            Mutant(
                "test_bad_items_are_the_requests_error",
                {"self.check(item)\n        return [": "return ["},
            ),
            Mutant(
                "test_bad_items_have_no_places",
                {"self.check(item)\n        return -": "return -"},
            ),
        ),
    ),
)

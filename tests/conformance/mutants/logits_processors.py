"""A processor that forbids a token, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import SHARED, Mutant, Specimen
from treadle.testing.logits import LogitsProcessorSuite

SOURCE = """
from treadle.api import impl
from treadle.errors import RequestError

TREADLE = {"logits_processors": ["mine"]}


class Mine:
    seen = None

    def validate_params(self, arguments):
        if not isinstance(arguments, int) or arguments < 0:
            raise RequestError("mine: a token id is wanted", param="extra_args")

    def apply(self, logits, arguments, tokens):
        token_ids = list(arguments)
        for row, token in enumerate(token_ids):
            logits[row, token] = float("-inf")
        return logits


@impl
def treadle_logits_processor(name):
    return Mine() if name == "mine" else None
"""


class Logits(LogitsProcessorSuite):
    arguments = (3, 9)
    refused = (-1, "x")


SPECIMENS = (
    Specimen(
        suite=Logits,
        plugin="logits_processors:mine",
        source=SOURCE,
        mutants=(
            Mutant("test_two_builds_are_two_objects", SHARED),
            Mutant("test_good_arguments_pass", {"arguments < 0": "arguments < 4"}),
            Mutant(
                "test_bad_arguments_are_the_requests_error",
                {"raise RequestError": "print", ', param="extra_args"': ""},
            ),
            Mutant(
                "test_the_result_has_the_shape_of_the_logits",
                {
                    "return logits": "return logits.double().float()[:, :-1] if len(token_ids) == 2 else logits"
                },
            ),
            Mutant("test_some_token_stays_allowed", {"logits[row, token]": "logits[row]"}),
            Mutant(
                "test_a_row_does_not_depend_on_the_others",
                {"return logits": "return logits - logits[:, 0].mean()"},
            ),
            Mutant(
                "test_the_order_of_the_rows_does_not_matter",
                {
                    "token_ids = list(arguments)": "self.seen = token_ids = self.seen or list(arguments)"
                },
            ),
            Mutant(
                "test_arguments_and_histories_are_left_as_they_are",
                {"return logits": "tokens[0].append(1)\n        return logits"},
            ),
        ),
    ),
)

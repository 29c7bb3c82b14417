"""An extension that counts engines and looks at policies, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.extensions import ExtensionSuite

METADATA = """Metadata-Version: 2.1
Name: mine
Version: 1.0
Requires-Dist: treadle-core>=0.0.1,<99
"""
SOURCE = """
from treadle.api import impl

ENGINES = []
SEEN = []


@impl
def treadle_configure(config):
    ENGINES.append(config)


@impl
def treadle_unconfigure():
    ENGINES.pop()


@impl
def treadle_report():
    return f"{len(ENGINES)} engines, {len(SEEN)} policies"


@impl(wrapper=True)
def treadle_scheduling_policy(name):
    found = yield
    if found is not None:
        SEEN.append(name)
    return found
"""

SPECIMENS = (
    Specimen(
        suite=ExtensionSuite,
        plugin="extensions:mine",
        source=SOURCE,
        metadata=METADATA,
        mutants=(
            Mutant("test_engines_begin_and_end", {"ENGINES.pop()": "ENGINES.remove(None)"}),
            Mutant(
                "test_engines_begin_and_end",
                {"ENGINES.append(config)": "ENGINES[:] = [config]"},
            ),
            Mutant(
                "test_the_configuration_is_left_as_it_is",
                {
                    "    ENGINES.append": "    config.plugins.stat_loggers.append('mine')\n    ENGINES.append"
                },
            ),
            Mutant("test_what_it_reports_is_one_line", {"engines, ": "engines\\n"}),
            Mutant("test_what_it_reports_is_one_line", {"{len(ENGINES)}": "{ENGINES[0]}"}),
            Mutant(
                "test_its_wrappers_give_an_answer",
                {"    return found\n": ""},
            ),
            Mutant(
                "test_its_wrappers_keep_what_nobody_provides",
                {"return found\n": "return found or SEEN\n"},
            ),
            Mutant(
                "test_its_wrappers_hand_on_errors",
                {
                    "    found = yield\n": "    try:\n        found = yield\n    except Exception:\n        return None\n"
                },
            ),
        ),
    ),
)

"""Every check bites: for each there is a plugin that is wrong in one way and fails it, and no other.

A mutant is a sound plugin in which one text is replaced.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.api.files import ModelRef
from weft.config import PluginConfig
from weft.plugins import Host
from weft.testing.kernels import KernelSuite
from weft.testing.logits import LogitsProcessorSuite
from weft.testing.plugin import PluginSuite
from weft.testing.policies import PolicySuite
from weft.testing.sources import LoadFormatSuite, ModelSourceSuite
from weft.testing.stats import StatLoggerSuite

spec = importlib.util.spec_from_file_location("checks", Path(__file__).with_name("checks.py"))
checks: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
sys.modules["checks"] = checks
spec.loader.exec_module(checks)  # type: ignore[union-attr]

POLICY = """
from weft.api import impl

WEFT = {"policies": ["mine"]}


class Mine:
    calls = 0

    def order(self, request):
        return (request.arrival,)

    def victim(self, running):
        self.calls += 1
        return max(range(len(running)), key=lambda i: running[i].arrival)


@impl
def weft_policy(name: str):
    return Mine() if name == "mine" else None
"""
OPTIONS = """
import msgspec


class Options(msgspec.Struct, frozen=True):
    depth: int = 1


WEFT_OPTIONS = {"policies:mine": Options}
"""
LOGGER = """
import time
from weft.api import impl

WEFT = {"stat_loggers": ["mine"]}


class Mine:
    def record(self, stats):
        self.last = stats.steps


@impl
def weft_stat_logger(name):
    return Mine() if name == "mine" else None
"""
PROCESSOR = """
from weft.api import impl
from weft.errors import RequestError

WEFT = {"logits_processors": ["mine"]}


class Mine:
    seen = None

    def check(self, arguments):
        if not isinstance(arguments, int) or arguments < 0:
            raise RequestError("mine: a token id is wanted", param="extra")

    def apply(self, logits, arguments, tokens):
        given = list(arguments)
        for row, token in enumerate(given):
            logits[row, token] = float("-inf")
        return logits


@impl
def weft_logits_processor(name):
    return Mine() if name == "mine" else None
"""
SOURCE = """
from weft.api import impl
from weft.api.files import ModelFiles
from weft.loading.sources import FolderSource

WEFT = {"model_sources": ["mine"]}


class Mine:
    calls = 0

    def resolve(self, ref, *, patterns):
        self.calls += 1
        found = FolderSource().resolve(ref, patterns=patterns)
        return ModelFiles(found.root, found.names, found.config)


@impl
def weft_model_source(scheme):
    return Mine() if scheme == "mine" else None
"""
FORMAT = """
from weft.api import impl
from weft.errors import CheckpointError
from weft.loading.formats import SafetensorsLoader

WEFT = {"load_formats": ["mine"]}


class Mine:
    def __init__(self, files):
        self.inner = SafetensorsLoader(files)
        self.left = 9

    def tensors(self, wanted):
        self.left -= 1
        for name, tensor in self.inner.tensors(wanted):
            yield name, tensor

    def where(self, name):
        return self.inner.where(name)


@impl
def weft_load_format(format, files):
    return Mine(files) if format == "mine" else None
"""
KERNEL = """
from weft.api import impl
from weft.api.types import KernelOffer, Refusal

WEFT = {"kernels": ["mine"]}


def load():
    import torch.nn.functional as F

    return lambda x, weight, eps, offset: F.rms_norm(x, weight.shape, weight, eps)


@impl
def weft_kernel(op, request):
    if op != "rms_norm":
        return None
    if request.device.kind != "cpu":
        return Refusal("mine", ("it is for the CPU",))
    return KernelOffer("mine", 10, load)
"""


class Logits(LogitsProcessorSuite):
    arguments = (3, 9)
    refused = (-1, "x")


class Source(ModelSourceSuite):
    def ref(self, folder: Path) -> ModelRef:
        (folder / "config.json").write_text('{"model_type": "x"}')
        (folder / "weights.bin").write_bytes(b"")
        return ModelRef("mine", str(folder))


class Format(LoadFormatSuite):
    def write(self, folder: Path, tensors: Any) -> None:
        from safetensors.torch import save_file

        save_file(dict(tensors), folder / "model.safetensors")


SOUND = {
    "plugin": (POLICY, PluginSuite, "policies:mine"),
    "policy": (POLICY, PolicySuite, "policies:mine"),
    "logger": (LOGGER, StatLoggerSuite, "stat_loggers:mine"),
    "processor": (PROCESSOR, Logits, "logits_processors:mine"),
    "source": (SOURCE, Source, "model_sources:mine"),
    "format": (FORMAT, Format, "load_formats:mine"),
    "kernel": (KERNEL, KernelSuite, "kernels:mine"),
}
SHARED = ("@impl", "ONE = Mine()\n\n@impl"), ("Mine() if", "ONE if")
BUILDS = "test_two_builds_are_two_objects"

# (plugin, the check that must fail, what is replaced by what)
MUTANTS: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    (
        "plugin",
        "test_it_is_found_and_loads",
        (('WEFT = {"', OPTIONS.replace('"policies:mine"', '"policy:mine"') + '\nWEFT = {"'),),
    ),
    ("plugin", "test_its_import_is_light", (("from weft.api", "import numpy\nfrom weft.api"),)),
    ("plugin", "test_it_leaves_the_keys_of_others_alone", ((' if name == "mine" else None', ""),)),
    ("plugin", "test_its_annotations_agree_with_the_hooks", (("name: str", "name: int"),)),
    ("plugin", "test_its_options_are_documented", (('WEFT = {"', OPTIONS + '\nWEFT = {"'),)),
    ("policy", BUILDS, SHARED),
    (
        "policy",
        "test_orders_are_numbers_that_compare",
        (("(request.arrival,)", "[request.arrival]"),),
    ),
    (
        "policy",
        "test_the_order_of_a_waiting_request_is_constant",
        (("(request.arrival,)", "(request.arrival, self.calls)"),),
    ),
    (
        "policy",
        "test_of_two_alike_the_earlier_goes_first",
        (("(request.arrival,)", "(request.arrival // 1000,)"),),
    ),
    (
        "policy",
        "test_nobody_waits_for_ever",
        (("(request.arrival,)", "(request.prompt_len, request.arrival)"),),
    ),
    (
        "policy",
        "test_a_victim_is_one_of_those_that_run",
        (("return max(", "return len(running) - 1 and -1 * max("),),
    ),
    (
        "policy",
        "test_all_requests_end_when_pages_run_out",
        (("self.calls += 1", "if running[0].prompt_len == 4: raise OSError"),),
    ),
    ("logger", BUILDS, SHARED),
    ("logger", "test_an_engine_that_has_done_nothing", (("= stats.steps", "= 1 / stats.steps"),)),
    ("logger", "test_a_run", (("= stats.steps", "= 1 / (stats.waiting - 2)"),)),
    (
        "logger",
        "test_an_engine_without_pages_or_time",
        (("= stats.steps", "= stats.steps and stats.steps / stats.step_seconds"),),
    ),
    ("logger", "test_it_is_quick", (("self.last", "time.sleep(0.002)\n        self.last"),)),
    ("processor", BUILDS, SHARED),
    ("processor", "test_good_arguments_pass", (("arguments < 0", "arguments < 4"),)),
    (
        "processor",
        "test_bad_arguments_are_the_requests_error",
        (("raise RequestError", "print"), (', param="extra"', "")),
    ),
    (
        "processor",
        "test_the_result_has_the_shape_of_the_logits",
        (
            (
                "return logits",
                "return logits.double().float()[:, :-1] if len(given) == 2 else logits",
            ),
        ),
    ),
    ("processor", "test_some_token_stays_allowed", (("logits[row, token]", "logits[row]"),)),
    (
        "processor",
        "test_a_row_does_not_depend_on_the_others",
        (("return logits", "return logits - logits[:, 0].mean()"),),
    ),
    (
        "processor",
        "test_the_order_of_the_rows_does_not_matter",
        (("given = list(arguments)", "self.seen = given = self.seen or list(arguments)"),),
    ),
    (
        "processor",
        "test_arguments_and_histories_are_left_as_they_are",
        (("return logits", "tokens[0].append(1)\n        return logits"),),
    ),
    ("source", BUILDS, SHARED),
    (
        "source",
        "test_the_files_are_there",
        (("found.names,", 'tuple(n.replace("weights", "w") for n in found.names),'),),
    ),
    (
        "source",
        "test_the_configuration_is_that_of_config_json",
        (("found.config)", '{"model_type": "y"})'),),
    ),
    (
        "source",
        "test_only_what_was_asked_for_is_listed",
        (("patterns=patterns)", 'patterns=["*"])'),),
    ),
    (
        "source",
        "test_it_may_be_asked_again",
        (("found.config)", "found.config if self.calls == 1 else {})"),),
    ),
    (
        "source",
        "test_what_is_not_there_is_said_so",
        (
            (
                "        found = ",
                "        from pathlib import Path\n        if not Path(ref.path).is_dir():\n            return ModelFiles(Path(ref.path), (), {})\n        found = ",
            ),
        ),
    ),
    (
        "format",
        "test_every_tensor_comes_as_it_was_stored",
        (("yield name, tensor", "yield name, tensor.float()"),),
    ),
    (
        "format",
        "test_what_is_not_wanted_does_not_come",
        (("tensors(wanted):", "tensors(lambda n: True):"),),
    ),
    (
        "format",
        "test_a_loader_may_be_read_twice",
        (("self.left -= 1", "self.left -= 8"), ("yield name", "if self.left > 0: yield name")),
    ),
    (
        "format",
        "test_a_file_can_be_named_for_a_tensor",
        (("return self.inner.where(name)", 'return "elsewhere"'),),
    ),
    (
        "format",
        "test_a_damaged_file_is_a_checkpoint_error",
        (
            (
                "        for name, tensor in",
                "        try:\n            list(self.inner.tensors(wanted))\n        except CheckpointError:\n            raise ValueError from None\n        for name, tensor in",
            ),
        ),
    ),
    ("kernel", "test_a_bid_is_an_offer_or_says_why_not", (('("it is for the CPU",)', "()"),)),
    (
        "kernel",
        "test_an_unknown_operation_is_nobodys",
        (
            (
                'if op != "rms_norm"',
                'if op in ("add_rms_norm", "silu_mul", "linear", "silu_linear", "likeliest", "rotary_write", "rotary_write_fp8", "sample")',
            ),
        ),
    ),
    ("kernel", "test_it_computes_what_the_layers_do", (("weight, eps)", "weight, eps) * 1.01"),)),
]


def broken(name: str, text: str, folder: Path) -> set[str]:
    _, suite, plugin = SOUND[name]
    file = folder / "mine.py"
    file.write_text(text)

    class Subject(suite):  # type: ignore[misc, valid-type]
        def host(self) -> Host:
            return Host(PluginConfig(plugin_file=[str(file)]))

    Subject.plugin = plugin
    scratch = folder / "scratch"
    scratch.mkdir()
    found: set[str] = checks.failing(Subject, scratch)
    return found


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_plugin_passes(name: str, tmp_path: Path) -> None:
    assert broken(name, SOUND[name][0], tmp_path) == set()


@pytest.mark.parametrize(
    ("name", "check", "changes"), MUTANTS, ids=[f"{n}-{c}" for n, c, _ in MUTANTS]
)
def test_a_mutant_fails_its_check_and_no_other(
    name: str, check: str, changes: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    text = SOUND[name][0]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    assert broken(name, text, tmp_path) == {check}


# Shown to bite by tests of the doctor's diagnoses: they need installed distributions.
OF_DISTRIBUTIONS = {"test_it_is_installed_as_it_says", "test_it_asks_for_a_range_of_the_core"}


@pytest.mark.parametrize("name", SOUND)
def test_every_check_has_a_mutant(name: str) -> None:
    known = {check for check, _ in checks.cases(SOUND[name][1])}
    assert known - {c for n, c, _ in MUTANTS if n == name} <= OF_DISTRIBUTIONS

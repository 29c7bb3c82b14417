"""The doctor's diagnoses: each of these plugins is broken in a way of its own."""

from __future__ import annotations

import json

import pytest

from treadle.testing.examination.findings import CODES
from treadle.testing.kernel_ops import KERNEL_OPS
from treadle_cli.doctor.machine import Machine, advice, inspect_machine
from treadle_cli.doctor.report import examine
from treadle_cli.doctor.survey import ATTENTION, DeviceReport

pytestmark = pytest.mark.early

POLICY = """
from treadle.api import impl

@impl
def treadle_scheduling_policy(name):
    return object()
"""

# key -> (module text, the one code that it must get, words of the text)
BROKEN = {
    "absent": ("import surely_not_installed\n" + POLICY, "dependency", "surely_not_installed"),
    "raises": ("1 / 0\n", "import", "ZeroDivisionError: division by zero"),
    "hangs": ("import time\ntime.sleep(60)\n", "hang", "no end after"),
    "dies": ("import os\nos.abort()\n", "crash", "SIGABRT"),
    "heavy": ("import numpy\n" + POLICY, "heavy", "numpy"),
    "cuda": ("import torch\ntorch.cuda.init()\n" + POLICY, "cuda", "starts CUDA"),
    "arguments": (POLICY.replace("(name)", "(nme)"), "signature", "nme"),
    "misnamed": (
        POLICY.replace("treadle_scheduling_policy", "treadle_polcy"),
        "signature",
        "treadle_polcy",
    ),
    "other": (
        POLICY.replace("treadle_scheduling_policy", "treadle_model_source").replace(
            "name", "scheme"
        ),
        "hook",
        "treadle_scheduling_policy",
    ),
    "options": (
        POLICY + "\nTREADLE_OPTIONS = {'scheduling_policies:options': int}\n",
        "options",
        "Struct",
    ),
}


@pytest.fixture
def broken(site):
    """Everything of ``BROKEN``, a well-behaved one, and those that metadata gives away."""
    for key, (code, *_) in BROKEN.items():
        site.install(f"x-{key}", {"treadle.scheduling_policies": {key: f"x_{key}"}}, code)
    site.install("good", {"treadle.scheduling_policies": {"good": "good"}}, POLICY + REPORT)
    for name in ("one", "two"):
        site.install(name, {"treadle.scheduling_policies": {"contested": name}}, POLICY)
    site.install("future", {"treadle.scheduling_policies.v2": {"future": "future"}}, POLICY)
    site.install(
        "old", {"treadle.scheduling_policies": {"old": "old"}}, POLICY, requires="treadle-core<0.1"
    )
    site.install(
        "needy",
        {"treadle.scheduling_policies": {"needy": "needy"}},
        POLICY,
        requires="not-there>=2",
    )
    site.install("astray", {"treadle.scheduling_policies": {"astray": "astray_module"}}, POLICY)
    site.install("empty", {"treadle.scheduling_policies": {"empty": "empty:Nothing"}}, POLICY)
    site.install(
        "edited", {"treadle.scheduling_policies": {"edited": "edited", "gone": "edited"}}, POLICY
    )
    project = site.folder / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project.entry-points."treadle.scheduling_policies"]\nedited = "edited"\nadded = "edited"\n'
    )
    record = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (site.folder / "edited-1.0.dist-info/direct_url.json").write_text(json.dumps(record))
    return site


REPORT = """
@impl
def treadle_report():
    return "all is well"
"""

EXPECTED = {key: (code, words) for key, (_, code, words) in BROKEN.items()} | {
    "contested": ("conflict", "choose one with --pin-plugin scheduling_policies:contested=DIST"),
    "future": ("generation", "speaks scheduling_policies v2, this treadle speaks v1"),
    "old": ("requirement", "requires treadle-core <0.1, installed is"),
    "needy": (
        "dependency",
        "it needs not-there, which is not installed; pip install 'not-there>=2'",
    ),
    "astray": ("target", "no module 'astray_module'"),
    "empty": ("target", "Nothing"),
    "gone": ("stale", "pip install -e"),
}


def test_each_broken_plugin_gets_its_own_diagnosis(broken):
    report = examine(broken.plugin_manager(), seconds=30.0, target=None, device="cpu")
    by_key = {}
    for checked in report.plugins:
        by_key.setdefault(checked.id.partition(":")[2], []).extend(checked.findings)
    assert by_key["good"] == []
    for key, (code, words) in EXPECTED.items():
        mine = by_key[key]
        assert {f.code for f in mine} == {code}, (key, mine)
        assert any(words in f.text for f in mine), (key, mine)
    texts = [f.text for key in by_key for f in by_key[key] if f.code == "stale"]
    assert any("added = 'edited' is written, but not installed" in t for t in texts)
    assert len({code for code, _ in EXPECTED.values()}) >= 8
    assert report.has_failures()
    # What hangs and dies is left out of the process that collects offers, which therefore answers.
    assert report.device is not None and report.problems == []
    assert report.device.device == "cpu"
    assert set(report.device.attention) == set(ATTENTION) and set(report.device.kernels) == set(
        KERNEL_OPS
    )
    assert report.reports == ["good 1.0: all is well"]


def test_a_sound_installation_passes_and_a_warning_does_not_fail(site):
    site.install("good", {"treadle.scheduling_policies": {"good": "good"}}, POLICY)
    report = examine(site.plugin_manager(), target="good")
    assert not report.has_failures(strict=True) and report.device is None
    assert report.plugins[0].seconds is not None and report.plugins[0].state == "loaded"
    site.install(
        "heavy", {"treadle.scheduling_policies": {"heavy": "heavy"}}, "import numpy\n" + POLICY
    )
    report = examine(site.plugin_manager(), target="heavy")
    assert not report.has_failures() and report.has_failures(strict=True)


def test_offers_are_listed_with_their_reasons(site):
    site.install(
        "never",
        {"treadle.attention_backends": {"never": "never"}},
        """
        from treadle.api import impl, types

        @impl
        def treadle_attention_backend(request):
            if request.softcap:
                return types.AttentionOffer("never", 3, lambda: None)
            return types.Refusal("never", ("it is a test", "and not ready"))
        """,
    )
    offers = examine(site.plugin_manager(), device="cpu").device.attention
    assert offers["plain"][0].reasons == ["it is a test", "and not ready"]
    assert (offers["soft cap"][0].name, offers["soft cap"][0].score) == ("never", 3)


def test_a_plugin_whose_offer_kills_the_process_is_a_problem(site):
    code = "from treadle.api import impl\n@impl\ndef treadle_attention_backend(request):\n    import os\n    os.abort()\n"
    site.install("boom", {"treadle.attention_backends": {"boom": "boom"}}, code)
    report = examine(site.plugin_manager(), device="cpu")
    assert report.has_failures() and "SIGABRT" in report.problems[0]


def test_a_local_file_is_examined(site, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text('TREADLE = {"scheduling_policies": ["mine"]}\n1 / 0\n')
    (checked,) = examine(
        site.plugin_manager(plugin_file=[str(file)]), target="scheduling_policies:mine"
    ).plugins
    assert [f.code for f in checked.findings] == ["import"] and checked.state == "broken"


def test_every_code_is_explained():
    assert all(text.strip() for text in CODES.values())
    assert {code for code, _ in EXPECTED.values()} <= set(CODES)


# -- what to install -----------------------------------------------------------------------


def device_report(cuda=None, device="cpu", capability=""):
    return DeviceReport("2.13.0", cuda, device, "NVIDIA H200", capability, 0, {}, {})


def machine(gpus=("NVIDIA H200",), driver="580.1.2"):
    return Machine("3.11", "linux", {}, list(gpus), driver)


@pytest.mark.parametrize(
    ("machine", "device", "installed", "words"),
    [
        (
            machine(),
            device_report(),
            (),
            ["built without CUDA; pip install torch --index-url", "/cu130"],
        ),
        (machine(driver="550.1"), device_report(), (), ["/cu126"]),
        (machine(driver="470.1"), device_report(), (), ["update the NVIDIA driver 470.1"]),
        (machine(), device_report("13.0"), (), ["finds no device; check CUDA_VISIBLE_DEVICES"]),
        (machine(), device_report("13.0", "cuda:0", "7.5"), (), ["fast kernels begin at 8.0"]),
        (
            machine(),
            device_report("13.0", "cuda:0", "9.0"),
            ("treadle-kernels-triton",),
            [
                "for NVIDIA H200: from a clone: pip install './kits/paged_attention' "
                "'./kits/triton' './plugins/backends/attention/triton'"
            ],
        ),
    ],
)
def test_advice_fits_the_machine(machine, device, installed, words):
    text = " ".join(advice(machine, device, installed))
    assert all(word in text for word in words), text


def test_there_is_no_advice_where_nothing_is_missing():
    plugins = ("treadle-attention-triton", "treadle-kernels-triton")
    assert list(advice(machine(), device_report("13.0", "cuda:0", "9.0"), plugins)) == []
    assert list(advice(machine(gpus=()), device_report(), ())) == []


def test_gpus_and_driver_are_read_without_torch(tmp_path):
    card = tmp_path / "driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 3\n")
    version = "NVRM version: NVIDIA UNIX Open Kernel Module  580.65.06  Release Build\n"
    (tmp_path / "driver/nvidia/version").write_text(version)
    machine_seen = inspect_machine(["treadle-core"], tmp_path)
    assert (machine_seen.gpus, machine_seen.driver) == (["NVIDIA H200"], "580.65.06")
    assert "treadle-core" in machine_seen.versions and "torch" in machine_seen.versions
    empty = inspect_machine([], tmp_path / "nothing")
    assert (empty.gpus, empty.driver) == ([], "")


def test_cuda_that_an_import_has_started_is_found(site):
    """Stands in for a machine with a device: a torch that says so."""
    fake = """
import sys, types

torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
sys.modules["torch"] = torch
"""
    site.install("starts", {"treadle.scheduling_policies": {"starts": "starts"}}, fake + POLICY)
    (checked,) = examine(site.plugin_manager(), target="starts").plugins
    assert {f.code for f in checked.findings} == {"cuda", "heavy"} and checked.state == "broken"

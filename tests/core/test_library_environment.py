"""How threads of OpenMP wait: chosen by the load of the machine, unless the user has chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from treadle.config import LIBRARY_ENVIRONMENT, SPIN_ENVIRONMENT, set_library_environment

VARIABLES = ("OMP_WAIT_POLICY", *SPIN_ENVIRONMENT)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing is chosen, four cores; what a test makes the code set is undone."""
    for name in (*LIBRARY_ENVIRONMENT, *SPIN_ENVIRONMENT):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    return monkeypatch


def chosen() -> dict[str, str]:
    set_library_environment()
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@pytest.mark.parametrize(("load", "spins"), [(0.0, True), (3.9, True), (4.0, False), (40.0, False)])
def test_threads_spin_if_cores_are_idle(
    environment: pytest.MonkeyPatch, load: float, spins: bool
) -> None:
    environment.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    passive = {"OMP_WAIT_POLICY": "passive"}
    assert chosen() == (passive | SPIN_ENVIRONMENT if spins else passive)


def test_threads_sleep_if_the_load_is_not_known(environment: pytest.MonkeyPatch) -> None:
    def unknown() -> tuple[float, float, float]:
        raise OSError("Load averages are unobtainable")

    environment.setattr(os, "getloadavg", unknown, raising=False)
    assert chosen() == {"OMP_WAIT_POLICY": "passive"}
    environment.delattr(os, "getloadavg")
    environment.delenv("OMP_WAIT_POLICY")
    assert chosen() == {"OMP_WAIT_POLICY": "passive"}


@pytest.mark.parametrize(
    "user",
    [
        {"OMP_WAIT_POLICY": "active"},
        {"OMP_WAIT_POLICY": "passive"},
        {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "7"},
        {"GOMP_SPINCOUNT": "7"},
        {"KMP_BLOCKTIME": "0"},
    ],
)
def test_what_the_user_has_set_stays(environment: pytest.MonkeyPatch, user: dict[str, str]) -> None:
    environment.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    for name, value in user.items():
        environment.setenv(name, value)
    found = chosen()
    assert found.items() >= user.items()
    if "OMP_WAIT_POLICY" in user:
        assert found == user


def test_what_a_parent_chose_holds_for_its_children(environment: pytest.MonkeyPatch) -> None:
    """Also when the load has changed: an engine and its ranks start while the machine is loading."""
    environment.setattr(os, "getloadavg", lambda: (40.0, 0.0, 0.0), raising=False)
    busy = chosen()
    environment.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert chosen() == busy == {"OMP_WAIT_POLICY": "passive"}


def test_the_runtime_of_torch_reads_them(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)
    chosen()
    code = "import torch; torch.set_num_threads(2)"
    variables = {"OMP_DISPLAY_ENV": "VERBOSE", "KMP_SETTINGS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    shown = (result.stderr + result.stdout).replace("'", "").replace(" ", "")
    assert "OMP_WAIT_POLICY=PASSIVE" in shown
    if "GOMP_" in shown:
        assert "GOMP_SPINCOUNT=5000" in shown
    else:
        assert "KMP_BLOCKTIME=200us" in shown

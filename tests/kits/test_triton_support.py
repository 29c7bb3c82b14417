"""Which devices Triton kernels run on, as an offer asks it: without torch and without Triton."""

from __future__ import annotations

import pytest

from treadle.api.cache import DeviceInfo
from treadle_triton_kit import support

HOPPER = DeviceInfo("cuda", (9, 0))


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (DeviceInfo("cpu"), "device 'cpu' is not CUDA"),
        (DeviceInfo("cuda", (7, 5)), "capability 7.5 is below 8.0"),
    ],
)
def test_other_devices_are_refused(
    device: DeviceInfo, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "is_triton_installed", lambda: True)
    assert support.triton_refusals(device) == [reason]
    assert support.triton_refusals(HOPPER) == []


def test_a_missing_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "is_triton_installed", lambda: False)
    (reason,) = support.triton_refusals(HOPPER)
    assert reason.startswith("triton is not installed")
    assert len(support.triton_refusals(DeviceInfo("cpu"))) == 2


def test_kernels_start_early_from_hopper_on() -> None:
    assert support.supports_pdl(HOPPER) and support.supports_pdl(DeviceInfo("cuda", (12, 0)))
    assert not support.supports_pdl(DeviceInfo("cuda", (8, 9)))
    assert not support.supports_pdl(DeviceInfo("cuda")) and not support.supports_pdl(
        DeviceInfo("cpu")
    )

"""Refusals of attention backends follow from their limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from treadle.api.attention import AttentionRequest, MaskKind
from treadle.api.cache import DeviceInfo
from treadle_paged_attention_kit.limits import BackendLimits, refusal_reasons
from treadle_paged_attention_kit.versions import installed_version, version_text

REQUEST = AttentionRequest(DeviceInfo("cuda", (8, 6)), "bfloat16", "auto", 64, 8, 2, 0.125)
LIMITS = BackendLimits(
    dtypes=("bfloat16",),
    page_sizes=(64, 16),
    head_sizes=range(16, 129, 16),
    fp8={"fp8_e4m3": (8, 9), "fp8_e5m2": (8, 0)},
    max_group=4,
    window=False,
    softcap=False,
)


def test_what_is_within_the_limits_has_no_reason() -> None:
    assert refusal_reasons(REQUEST, LIMITS) == []
    assert refusal_reasons(replace(REQUEST, kv_dtype="fp8_e5m2", page_size=16), LIMITS) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": DeviceInfo("cpu"), "head_size": 7}, "device 'cpu' is not CUDA"),
        ({"device": DeviceInfo("cuda", (7, 5))}, "capability 7.5 is below 8.0"),
        ({"device": DeviceInfo("cuda")}, "capability 0.0 is below 8.0"),
        ({"dtype": "float16"}, "dtype float16 is not one of bfloat16"),
        ({"kv_dtype": "float16"}, "kv_dtype float16 is neither bfloat16 nor fp8"),
        ({"kv_dtype": "fp8_e4m3"}, "fp8_e4m3 needs capability 8.9, this is 8.6"),
        ({"head_size": 24}, "head size 24 is not a multiple of 16 from 16 to 128"),
        ({"num_heads": 10}, "more than 4 query heads share one key/value head"),
        ({"page_size": 32}, "page size 32 is not one of 16, 64"),
        ({"mask": MaskKind.TREE}, "mask tree is not supported"),
        ({"window": 8}, "sliding windows are not supported"),
        ({"softcap": 30.0}, "a soft cap is not supported"),
        ({"sinks": True}, "attention sinks are not supported"),
        ({"latent": True}, "latent (MLA) caches are not supported"),
        ({"num_heads": 7}, "7 query heads cannot share 2 key/value heads evenly"),
    ],
)
def test_each_limit_has_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert refusal_reasons(replace(REQUEST, **changes), LIMITS) == [reason]


def test_a_backend_without_fp8_does_not_mention_it() -> None:
    (reason,) = refusal_reasons(replace(REQUEST, kv_dtype="fp8_e4m3"), replace(LIMITS, fp8={}))
    assert reason == "kv_dtype fp8_e4m3 is not bfloat16"


def test_versions_are_read_from_metadata() -> None:
    version = installed_version("pytest")
    assert version is not None and version >= (9,) and version_text((0, 0, 35)) == "0.0.35"
    assert installed_version("no-such-distribution") is None

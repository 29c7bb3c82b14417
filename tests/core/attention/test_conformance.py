from dataclasses import replace
from typing import Any

import pytest

from weft.api.attention import AttentionRequest, Offer, Refusal
from weft.attention.plugin import weft_attention
from weft.attention.sdpa import SdpaAttention
from weft.testing.attention import AttentionSuite


class TestSdpa(AttentionSuite):
    key = "sdpa"

    def bid(self, request: AttentionRequest) -> Offer | Refusal:
        return weft_attention(request, {})


def test_the_suite_finds_sdpa_by_its_key() -> None:
    class Suite(AttentionSuite):
        key = "sdpa"

    _, offer = Suite().offer("float32")
    assert offer.name == "sdpa" and offer.score == 50


class NeverScales(SdpaAttention):
    def forward(self, *args: Any) -> Any:
        return super().forward(*args[:5])


class ScalesWhatIsReadOnly(SdpaAttention):
    def forward(self, q: Any, k: Any, v: Any, *args: Any) -> Any:
        if k is not None:
            super().forward(q, k, v, *args[:2])
        return super().forward(q, None, None, *args)


class ForgetsTheValues(SdpaAttention):
    def forward(self, q: Any, k: Any, v: Any, cache: Any, plan: Any, scales: Any = None) -> Any:
        if scales is None:
            return super().forward(q, k, v, cache, plan)
        return super().forward(q, k, v, cache, plan, scales) / scales[1]


@pytest.mark.parametrize("wrong", [NeverScales, ScalesWhatIsReadOnly, ForgetsTheValues])
def test_the_check_of_scales_bites(wrong: type[SdpaAttention]) -> None:
    class Suite(TestSdpa):
        def bid(self, request: AttentionRequest) -> Offer | Refusal:
            bid = super().bid(request)
            assert isinstance(bid, Offer)
            return replace(bid, create=lambda: wrong(request))

    for name in ("fp8_e4m3", "fp8_e5m2"):
        with pytest.raises(AssertionError, match=r"relative error|not finite"):
            Suite().test_a_cache_in_fp8_has_scales(name)

from weft.api.attention import AttentionRequest, Offer, Refusal
from weft.attention.plugin import weft_attention
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

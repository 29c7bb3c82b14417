"""The backend ``sdpa`` under another name, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.attention import AttentionSuite, steps

SOURCE = """
from dataclasses import replace

import torch
from treadle.api import impl
from treadle.api.types import AttentionOffer, Refusal
import treadle_sdpa as plugin
from treadle_sdpa.sdpa import SdpaAttention

TREADLE = {"attention_backends": ["mine"]}


class Mine(SdpaAttention):
    pass


@impl
def treadle_attention_backend(request):
    offer = plugin.treadle_attention_backend(request, {})
    if isinstance(offer, Refusal):
        return Refusal("mine", offer.reasons)
    return replace(offer, name="mine", create=lambda: Mine(request))
"""


def mine(body: str) -> dict[str, str]:
    """The edits of a backend with these methods."""
    return {"    pass\n": body}


def forward(
    before: str = "", after: str = "", arguments: str = "q, k, v, cache, metadata, scales"
) -> dict[str, str]:
    """The edits of a backend that does something around its work."""
    return mine(f"""
    def forward(self, q, k, v, cache, metadata, scales=(1.0, 1.0), **sinks):
        {before}
        out = super().forward({arguments}, **sinks)
        {after}
        return out
""")


class Attention(AttentionSuite):
    steps = {name: steps[name] for name in ("one decode", "decodes", "mixed")}


SPECIMENS = (
    Specimen(
        suite=Attention,
        plugin="attention_backends:mine",
        source=SOURCE,
        only={
            "name": (
                "float32",
                "soft cap",
                "fp8_e4m3",
                "narrow window",
                "sinks",
                "tree",
                "no kv heads",
            )
        },
        mutants=(
            Mutant("test_an_answer_is_an_offer_or_says_why_not", {"offer.reasons)": "())"}),
            Mutant(
                "test_an_answer_is_an_offer_or_says_why_not",
                {"    offer =": "    request.num_heads // request.num_kv_heads\n    offer ="},
            ),
            Mutant(
                "test_every_step_is_what_the_reference_says",
                {"Mine(request)": "Mine(replace(request, softcap=None))"},
            ),
            Mutant("test_every_step_is_what_the_reference_says", forward("sinks.clear()")),
            Mutant("test_a_cache_in_fp8_has_scales", forward(arguments="q, k, v, cache, metadata")),
            Mutant(  # scales what is read only
                "test_a_cache_in_fp8_has_scales",
                forward(
                    "if k is not None: super().forward(q, k, v, cache, metadata)",
                    arguments="q, None, None, cache, metadata, scales",
                ),
            ),
            Mutant("test_a_cache_in_fp8_has_scales", forward(after="out = out / scales[1]")),
            Mutant(
                "test_every_page_size_that_it_offers",
                mine("""
    def build_metadata(self, batch):
        return super().build_metadata(replace(batch, page_size=batch.page_size * (1 + (batch.page_size == 8))))
"""),
            ),
            Mutant(
                "test_tokens_may_have_been_written_already",
                forward(
                    "if k is None and scales == (1.0, 1.0): k = v = q[:, : self.num_kv_heads] * 0"
                ),
            ),
            Mutant(
                "test_page_0_never_matters", forward(after="out += 0 * cache[0, 0].float().sum()")
            ),
            Mutant(
                "test_slices_of_one_projection_will_do", forward("q = q.view(-1).view(q.shape)")
            ),
            Mutant(
                "test_one_plan_serves_every_layer",
                forward(
                    "done = vars(self).setdefault('done', [None, None])",
                    "self.done = done = done if done[0] is metadata else [metadata, out]; out = done[1]",
                ),
            ),
            Mutant(
                "test_two_plans_do_not_meet",
                mine("""
    def build_metadata(self, batch):
        self.now = super().build_metadata(batch)
        return self.now

    def forward(self, q, k, v, cache, metadata, *scales, **sinks):
        return super().forward(q, k, v, cache, self.now, *scales, **sinks)
"""),
            ),
            Mutant(
                "test_a_result_is_written_where_the_caller_says",
                mine("""
    def forward_into(self, out, *arguments, **sinks):
        out[1:] = self.forward(*arguments, **sinks)[1:]
"""),
            ),
            Mutant(
                "test_its_slots_are_where_tokens_lie",
                mine("""
    def slot_mapping(self, metadata):
        return metadata.slot_mapping // 2
"""),
            ),
            Mutant(
                "test_a_row_does_not_depend_on_the_others",
                forward(
                    after="out[0, 0, 0] += 0.01 * (len(out) == 5 and q.dtype is torch.float32)"
                ),
            ),
            Mutant(
                "test_a_graph_safe_plan_reads_the_device_only",
                {'name="mine"': 'name="mine", graph_safe=True'},
            ),
        ),
    ),
)

"""A model of the usual decoder, and what may be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mutants.specimen import Mutant, Specimen
from treadle.testing.architectures import ModelSuite

SOURCE = """
from treadle.api import impl
from treadle.api.types import ModelSpec

TREADLE = {"models": ["MineForCausalLM"]}
BUILT = {}


def build(ctx):
    from treadle_layers_kit import CausalDecoder, DecoderLayer, GatedMLP, SelfAttention, head_size

    config = ctx.hf_config

    def layer(ctx, prefix, index, rotary):
        attention = SelfAttention(
            ctx,
            f"{prefix}.self_attn",
            rotary,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=head_size(config),
        )
        mlp = GatedMLP(
            ctx,
            f"{prefix}.mlp",
            config.hidden_size,
            config.intermediate_size,
            activation="silu",
        )
        return DecoderLayer(ctx, attention, mlp)

    class Mine(CausalDecoder):
        def forward(self, ids, positions, forward_ctx):
            hidden = super().forward(ids, positions, forward_ctx)
            return hidden

    made = Mine(ctx, layer)
    return made


@impl
def treadle_model_config(config):
    from treadle_llama.config import FIELDS
    from treadle_layers_kit.model_config import read_fields

    fields = read_fields(config, FIELDS)
    return fields


@impl
def treadle_model(architecture):
    if architecture != "MineForCausalLM":
        return None
    packed_modules_mapping = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    return ModelSpec(architecture, build, packed_modules_mapping=packed_modules_mapping)
"""


class Model(ModelSuite):
    made: Path | None = None

    def checkpoint(self, folder: Path, **changes: Any) -> Path:
        """A Llama under the name of the model, made once."""
        from treadle.testing.checkpoints import make_checkpoint

        if Model.made is None:
            Model.made = make_checkpoint(folder, num_hidden_layers=2)
            file = folder / "config.json"
            config = json.loads(file.read_text())
            file.write_text(json.dumps({**config, "architectures": ["MineForCausalLM"]}))
        return Model.made


POSITIONS = "            hidden = super"
SPECIMENS = (
    Specimen(
        suite=Model,
        plugin="models:MineForCausalLM",
        source=SOURCE,
        mutants=(
            Mutant("test_the_spec_names_its_architecture", {"Spec(architecture": "Spec('Mine'"}),
            Mutant(
                "test_a_configuration_that_it_reads_is_that_of_transformers",
                {"return fields": "return {**fields, 'initializer_range': 0.5}"},
            ),
            Mutant("test_logits_are_those_of_transformers", {'"silu"': '"gelu"'}),
            Mutant(
                "test_steps_add_up_to_one_prefill",
                {"return hidden": "return hidden * (1 + 0.1 * bool(positions[0]))"},
            ),
            Mutant(
                "test_sequences_in_one_batch_do_not_meet",
                {
                    POSITIONS: "            positions = positions[0] + (ids >= 0).cumsum(0) - 1\n"
                    + POSITIONS
                },
            ),
            Mutant(
                "test_every_layer_has_a_cache_of_its_own",
                {"{prefix}.self_attn": "self_attn"},
                also=frozenset({"test_quantization_is_asked_by_the_checkpoints_names"}),
                why="the prefix names the matrices and the cache of a layer",
            ),
            Mutant(
                "test_ranks_agree_with_one_device",
                {
                    "kv_heads=config.num_key_value_heads": "kv_heads=config.num_key_value_heads // ctx.tp_group.world_size"
                },
            ),
            Mutant(
                "test_tokens_that_are_not_wanted_may_be_left_out",
                {
                    "return hidden": """if forward_ctx.logits_indices is not None:
                hidden = super().forward(ids, positions, type(forward_ctx)(forward_ctx.attn_metadata))
            return hidden if forward_ctx.logits_indices is None else hidden[: len(forward_ctx.logits_indices)]"""
                },
            ),
            Mutant("test_it_runs_in_bfloat16", {"return hidden": "return hidden.float()"}),
            Mutant(
                "test_quantization_is_asked_by_the_checkpoints_names",
                {"{prefix}.mlp": "{prefix}.feed_forward"},
            ),
            Mutant(
                "test_two_models_share_nothing",
                {
                    "made = Mine(ctx, layer)": "kind = ctx.tp_group.rank, ctx.tp_group.world_size, ctx.dtype\n"
                    "    made = BUILT.setdefault(kind, Mine(ctx, layer))"
                },
            ),
        ),
    ),
)

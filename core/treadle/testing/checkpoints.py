"""Tiny checkpoints with random weights, written by transformers, for tests.

The weights are drawn so that logits differ clearly between tokens (a model initialised as for
training answers almost uniformly, and would hide mistakes), and biases and norms are not trivial.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ("TINY", "make_checkpoint", "make_model", "make_tokenizer", "tiny_config")

VOCAB = 320

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
"""Sizes of ``tiny_config``; the ids are those of ``make_tokenizer``."""
EXPERTS: dict[str, int] = {"num_experts": 8, "moe_intermediate_size": 24}
"""Further sizes of configurations that have these fields."""

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> Any:
    """A transformers configuration of a known architecture with the sizes of ``TINY``.

    Raises ``ValueError`` for an architecture that transformers does not have.
    """
    import transformers

    model = getattr(transformers, architecture, None)
    if model is None:
        raise ValueError(
            f"transformers {transformers.__version__} has no {architecture}; "
            "in a test of ModelSuite, override checkpoint to write one"
        )
    experts = {k: v for k, v in EXPERTS.items() if hasattr(model.config_class, k)}
    values = {**experts, **TINY, **changes}
    if "num_attention_heads" not in changes and "head_dim" not in changes:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return model.config_class(architectures=[architecture], **values)


def make_model(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return the transformers model of a configuration, in evaluation mode, with random weights."""
    import transformers

    architecture = getattr(transformers, config.architectures[0])
    config._attn_implementation = "eager"
    model = architecture(config)
    draw_weights(model, seed)
    return model.to(dtype).eval()


def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Redraw every parameter: matrices by their fan-in, norms around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(values * 1.5 / math.sqrt(parameter.shape[-1]))
            elif name.endswith("bias"):
                parameter.copy_(values * 0.3)
            else:
                parameter.copy_(1.0 + 0.2 * values)


def make_checkpoint(
    folder: str | Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str | None = None,
    tokenizer: bool = False,
    **changes: Any,
) -> Path:
    """Write a checkpoint and return its folder.

    ``shard_size`` (``"100KB"``) splits the weights over several files; ``tokenizer`` adds a
    byte-level tokenizer with a chat template; ``changes`` are fields of the configuration.
    """
    folder = Path(folder)
    model = make_model(tiny_config(architecture, **changes), seed=seed, dtype=dtype)
    model.save_pretrained(folder, max_shard_size=shard_size or "5GB")
    if tokenizer:
        make_tokenizer(folder, model.config.vocab_size)
    return folder


def make_tokenizer(folder: str | Path, vocab_size: int = VOCAB) -> Path:
    """Write a byte-level tokenizer: ids 0 to 255 are bytes, then ``SPECIAL``, then unused ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + len(SPECIAL):
        raise ValueError(f"vocab_size is {vocab_size}; at least {len(alphabet) + len(SPECIAL)}")
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=raw, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return Path(folder)

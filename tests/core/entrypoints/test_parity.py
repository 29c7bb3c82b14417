"""Greedy tokens and log probabilities equal transformers', however the engine batches."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.early

ROPE = {
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-llama3-rope": ("LlamaForCausalLM", {"rope_parameters": ROPE["llama3"]}),
    "llama-linear-rope": ("LlamaForCausalLM", {"rope_parameters": ROPE["linear"]}),
    "llama-yarn-rope": ("LlamaForCausalLM", {"rope_parameters": ROPE["yarn"]}),
    "llama-tied-bias": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": 11}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    # No plugin of their own: the fallback runs them.
    "phi3": ("Phi3ForCausalLM", {}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 8, "num_experts_per_tok": 3}),
}
VOCAB = 320
NEW = 24


def prompts(seed: int = 0) -> dict[str, list[int]]:
    """Lengths around page boundaries; some begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(40)]
    prompts_by_name = {}
    for i, (shared, suffix_len) in enumerate(
        [(0, 1), (0, 5), (16, 1), (33, 7), (40, 21), (0, 16), (17, 30)]
    ):
        prompts_by_name[f"p{i}"] = common[:shared] + [
            rng.randrange(VOCAB) for _ in range(suffix_len)
        ]
    return prompts_by_name


@pytest.fixture(scope="module")
def expected(checkpoint: Callable[..., Path]) -> Callable[[str], dict[str, Any]]:
    """transformers' greedy continuation and log probabilities of each prompt, alone."""
    by_model: dict[str, dict[str, Any]] = {}

    def generate(name: str) -> dict[str, Any]:
        if name not in by_model:
            by_model[name] = transformers_greedy(checkpoint(MODELS[name][0], **MODELS[name][1]))
        return by_model[name]

    return generate


def transformers_greedy(folder: Path) -> dict[str, Any]:
    return {name: greedy(folder, prompt, NEW) for name, prompt in prompts().items()}


def greedy(folder: Path, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy continuation, and the log probabilities of all positions."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        input_ids = torch.tensor([prompt])
        ids = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),  # else it takes the pad token for padding
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
        )
        logprobs = model(ids).logits[0].log_softmax(-1)
    return ids[0, len(prompt) :].tolist(), logprobs


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "chunks-of-1": {"chunked_prefill_size": 1},
    "chunks-of-7": {"chunked_prefill_size": 7},
    "chunks-of-16": {"chunked_prefill_size": 16},
    "small-budget": {"max_num_batched_tokens": 10},
    "small-pages": {"page_size": 4},
    "preempted": {"page_size": 4, "num_pages": 44, "max_num_seqs": 7},
    "preempted-chunks": {"page_size": 4, "num_pages": 40, "chunked_prefill_size": 5},
    "two-slots": {"max_num_seqs": 2},
}


# Every model runs the first few variants; one model of each kind of cache runs all.
FEW, ALL = ("default", "chunks-of-7", "preempted"), ("llama", "mistral", "qwen3", "gemma3")
CASES = [(m, v) for m in MODELS for v in VARIANTS if v in FEW or m in ALL]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_greedy_equals_transformers(
    name: str, variant: str, engine: Any, checkpoint: Any, expected: Any
) -> None:
    folder = checkpoint(MODELS[name][0], **MODELS[name][1])
    driven = engine(folder, **VARIANTS[variant])
    for request, prompt in prompts().items():
        driven.add(request, prompt, max_tokens=NEW, ignore_eos=True, logprobs=2)
    driven.run()
    for request, prompt in prompts().items():
        tokens, logprobs = expected(name)[request]
        assert driven.tokens[request] == tokens
        assert driven.reasons[request] == "length"
        for i, entry in enumerate(driven.logprobs[request]):
            row = logprobs[len(prompt) + i - 1]
            assert entry.ids[0] == tokens[i] and entry.rank == 1
            exact = row[torch.tensor(entry.ids)]
            assert torch.allclose(exact, torch.tensor(entry.logprobs), atol=1e-4)
    if name.startswith("gemma"):
        assert [g.kind for g in driven.core.info.kv_cache_groups] == ["sliding", "full"]
    if variant.startswith("preempted") and name != "mistral":
        assert driven.core.stats.num_preemptions > 0
    if variant == "default":
        assert driven.core.stats.prefix_cache_hits == 0  # all arrived at once


def test_positions_beyond_4096(engine: Any, checkpoint: Any) -> None:
    folder = checkpoint("LlamaForCausalLM", max_position_embeddings=8192)
    rng = random.Random(3)
    prompt = [rng.randrange(VOCAB) for _ in range(4200)]
    tokens, logprobs = greedy(folder, prompt, 4)
    driven = engine(folder, num_pages=300, page_size=16, max_num_batched_tokens=1500)
    driven.add("long", prompt, max_tokens=4, ignore_eos=True, logprobs=2)
    driven.run()
    assert driven.tokens["long"] == tokens
    for i, entry in enumerate(driven.logprobs["long"]):
        exact = logprobs[len(prompt) + i - 1][torch.tensor(entry.ids)]
        assert torch.allclose(exact, torch.tensor(entry.logprobs), atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "phi3"])
def test_one_at_a_time_hits_the_prefix_cache(
    name: str, engine: Any, checkpoint: Any, expected: Any
) -> None:
    driven = engine(checkpoint(MODELS[name][0], **MODELS[name][1]))
    for request, prompt in prompts().items():
        driven.add(request, prompt, max_tokens=NEW, ignore_eos=True)
        driven.run()
        assert driven.tokens[request] == expected(name)[request][0]
    assert driven.cached == {"p3": 16, "p4": 32, "p6": 16}


def test_requests_join_and_leave(engine: Any, checkpoint: Any, expected: Any) -> None:
    driven = engine(checkpoint(), page_size=4, num_pages=48, chunked_prefill_size=6)
    rng = random.Random(5)
    waiting = list(prompts().items())
    while waiting or driven.core.has_work:
        if waiting and rng.random() < 0.3:
            request, prompt = waiting.pop(0)
            driven.add(request, prompt, max_tokens=NEW, ignore_eos=True)
            driven.add(f"gone-{request}", prompt, max_tokens=NEW, ignore_eos=True)
        abortable = [n for n in driven.core.scheduler.sequences if n.startswith("gone")]
        if abortable and rng.random() < 0.15:
            driven.core.abort_requests([rng.choice(abortable)])
        driven.step()
    for request in prompts():
        assert driven.tokens[request] == expected("llama")[request][0]
        gone_tokens = driven.tokens[f"gone-{request}"]
        assert gone_tokens == expected("llama")[request][0][: len(gone_tokens)]
    assert driven.core.stats.finished["abort"] > 0


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prompt_logprobs(name: str, engine: Any, checkpoint: Any, expected: Any) -> None:
    driven = engine(checkpoint(MODELS[name][0], **MODELS[name][1]), chunked_prefill_size=9)
    for attempt in range(2):  # the second one must not be cut short by the prefix cache
        for request, prompt in prompts().items():
            driven.add(f"{request}-{attempt}", prompt, max_tokens=1, prompt_logprobs=3)
        driven.run()
    for request, prompt in prompts().items():
        _, logprobs = expected(name)[request]
        for attempt in range(2):
            entries = driven.prompt_logprobs[f"{request}-{attempt}"]
            assert len(entries) == len(prompt) - 1
            for i, line in enumerate(entries):
                assert line.ids[0] == prompt[i + 1]
                exact = logprobs[i][torch.tensor(line.ids)]
                assert torch.allclose(exact, torch.tensor(line.logprobs), atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"enable_prefix_caching": False}, {"page_size": 4, "num_pages": 50}]
)
def test_siblings_share_the_prompt(options: dict[str, Any], engine: Any, checkpoint: Any) -> None:
    driven = engine(checkpoint(), **options)
    prompt = prompts()["p4"]
    for i in range(4):
        driven.add(
            f"s{i}", prompt, max_tokens=12, ignore_eos=True, temperature=1.0, seed=7, index=i,
            leader="s0" if i else None,
        )  # fmt: skip
    max_used = 0
    while driven.core.has_work:
        driven.step()
        max_used = max(max_used, driven.core.stats.num_used_pages)
    size = driven.core.info.page_size
    pages_per_sequence = -(-(len(prompt) + 12) // size)
    shared = (len(prompt) - 1) // size
    assert max_used <= pages_per_sequence + 3 * (pages_per_sequence - shared)
    outputs = [tuple(driven.tokens[f"s{i}"]) for i in range(4)]
    assert len(set(outputs)) == 4
    # The same seed and index alone give the same tokens.
    single = engine(checkpoint())
    single.add("x", prompt, max_tokens=12, ignore_eos=True, temperature=1.0, seed=7, index=2)
    single.run()
    assert tuple(single.tokens["x"]) == outputs[2]

"""Steps with prompts that are replayed compute what steps that are launched compute."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from treadle import LLM, SamplingParams
from treadle.testing.checkpoints import make_checkpoint

LENGTHS = (1, 2, 7, 8, 9, 31, 64, 65, 200, 333, 511, 512, 513, 700, 1024, 1500, 2048, 2500)


def prompts() -> list[list[int]]:
    """Prompts of many lengths, some of which have a long prefix in common."""
    source = random.Random(5)
    texts = [[source.randrange(3, 90) for _ in range(length)] for length in LENGTHS]
    return [*texts, *(texts[-1][:600] + text[:40] for text in texts[5:])]


def answers(folder: Path, *, enforce_eager: bool) -> tuple[int, list[list[int]]]:
    """Return up to how many tokens steps are replayed, and the tokens of each answer."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = prompts()
    with LLM(
        str(folder), dtype="float32", max_model_len=4096, max_num_seqs=16, skip_tokenizer_init=True,
        enforce_eager=enforce_eager, gpu_memory_utilization=0.1,
    ) as llm:  # fmt: skip
        groups = [[text] for text in texts[:8]] + [texts, texts[::-1]]
        outputs = [out for group in groups for out in llm.generate(group, params, use_tqdm=False)]
        max_tokens = llm.info.max_graph_tokens
    return max_tokens, [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("architecture", "max_tokens"),
    [
        ("LlamaForCausalLM", 2048),
        ("MistralForCausalLM", 2048),  # with a window
        ("Qwen3ForCausalLM", 2048),
        ("Gemma2ForCausalLM", 2048),  # windows in every other layer
        ("MixtralForCausalLM", 256),  # which asks the device who was chosen
    ],
)
def test_answers_are_those_of_launched_steps(
    tmp_path: Path, architecture: str, max_tokens: int
) -> None:
    window = {"sliding_window": 50} if architecture[0] in "MG" else {}
    make_checkpoint(tmp_path, architecture, max_position_embeddings=4096, **window)
    _, launched = answers(tmp_path, enforce_eager=True)
    assert answers(tmp_path, enforce_eager=False) == (max_tokens, launched)

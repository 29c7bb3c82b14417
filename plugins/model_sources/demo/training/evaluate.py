"""Answer the held-out questions greedily and count what is right.

python -m training.evaluate treadle_demo/model            # on one GPU or on the CPU
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from .cases import Case, cases
from .chat import prompt_text
from .checks import passes
from .tokenizer import IM_END

__all__ = ("answers", "evaluate", "main")


@torch.no_grad()
def answers(
    model: LlamaForCausalLM, prompts: list[list[int]], *, max_tokens: int = 160
) -> list[list[int]]:
    """Greedy continuations. Prompts of one length run together, so that nothing is padded."""
    out: list[list[int]] = [[] for _ in prompts]
    groups: dict[int, list[int]] = defaultdict(list)
    for i, ids in enumerate(prompts):
        groups[len(ids)].append(i)
    for rows in groups.values():
        ids = torch.tensor([prompts[i] for i in rows], device=model.device)
        result = model(input_ids=ids, use_cache=True)
        open_rows = set(rows)
        for _ in range(max_tokens):
            token = result.logits[:, -1].argmax(-1)
            for i, t in zip(rows, token.tolist(), strict=True):
                if i in open_rows and t in (IM_END, 0):
                    open_rows.discard(i)
                elif i in open_rows:
                    out[i].append(t)
            if not open_rows:
                break
            result = model(
                input_ids=token[:, None], past_key_values=result.past_key_values, use_cache=True
            )
    return out


def evaluate(folder: Path, device: str, log: Path | None = None) -> dict[str, tuple[int, int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    all_cases: tuple[Case, ...] = cases()
    texts = [c.text.text if c.text else prompt_text(c.chat) for c in all_cases]
    outputs = answers(model, [encoding.ids for encoding in tokenizer.encode_batch(texts)])
    score: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    lines = []
    for case, prompt, ids in zip(all_cases, texts, outputs, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if case.text:
            text = case.text.text + text
        is_right = passes(case.check, case.want, text)
        score[case.kind][0] += is_right
        score[case.kind][1] += 1
        lines.append(
            json.dumps(
                {
                    "right": is_right,
                    "kind": case.kind,
                    "prompt": prompt[-400:],
                    "answer": text,
                    "want": case.want,
                },
                ensure_ascii=False,
            )
        )
    if log:
        log.write_text("\n".join(lines) + "\n")
    return {k: (a, b) for k, (a, b) in score.items()}


def table(score: dict[str, tuple[int, int]]) -> str:
    rows = [f"| {k} | {a} / {b} | {100 * a / b:.0f} % |" for k, (a, b) in score.items()]
    return "\n".join(["| held-out questions | right | |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    print(table(evaluate(args.folder, "cuda" if torch.cuda.is_available() else "cpu", args.log)))


if __name__ == "__main__":
    main()

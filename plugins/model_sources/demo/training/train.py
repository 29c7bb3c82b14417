"""Train the demo model from nothing, save it in bfloat16, and evaluate what was saved.

python -m training.train --out build/demo --minutes 6
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from .data import Samples, build, pieces, sample
from .evaluate import evaluate, table
from .tokenizer import CONTEXT, IM_END, train_tokenizer, write_files

__all__ = ("main",)

VOCAB = 4096


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=IM_END,
        pad_token_id=0,
        initializer_range=0.03,
        dtype="bfloat16",
    )


def groups(model: LlamaForCausalLM, decay: float) -> list[dict[str, object]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]


def rate(progress: float, peak: float) -> float:
    """Learning rate after a share ``progress`` of the training: short warm-up, then a cosine to 2 %."""
    if progress < 0.01:
        return peak * (0.02 + progress / 0.01)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.01) / 0.99))))


class Loader:
    """Endless epochs over the buckets, as device tensors."""

    def __init__(self, samples: Samples, budget: int, device: str, seed: int) -> None:
        self.samples, self.budget, self.device, self.rng = (
            samples,
            budget,
            device,
            random.Random(seed),
        )
        self.queue: list[tuple[int, np.ndarray]] = []
        self.epochs = 0.0
        self.held = {
            w: (torch.from_numpy(i.astype(np.int16)).to(device), torch.from_numpy(k).to(device))
            for w, (i, k) in samples.arrays.items()
        }

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.queue:
            self.queue = self.samples.batches(self.budget, self.rng)
            self.size = len(self.queue)
        width, rows = self.queue.pop()
        self.epochs += 1 / self.size
        ids, weights = self.held[width]
        index = torch.from_numpy(rows).to(self.device, non_blocking=True)
        return ids[index].long(), weights[index].float() / 255


def step(
    model: LlamaForCausalLM, loader: Loader, num_batches: int, device: str
) -> tuple[torch.Tensor, int]:
    batches = [loader.next() for _ in range(num_batches)]
    total = torch.stack([w[:, 1:].sum() for _, w in batches]).sum()
    loss = torch.zeros((), device=device)
    tokens = 0
    for ids, weights in batches:
        with torch.autocast(device, torch.bfloat16):
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            logits = F.linear(hidden, model.lm_head.weight)
        token_loss = F.cross_entropy(
            logits.float().view(-1, VOCAB), ids[:, 1:].reshape(-1), reduction="none"
        )
        batch_loss = (token_loss * weights[:, 1:].reshape(-1)).sum() / total
        batch_loss.backward()
        loss += batch_loss.detach()
        tokens += ids.numel()
    return loss, tokens


def compile_layers(model: LlamaForCausalLM, loader: Loader, device: str) -> None:
    """Compile before the clock starts; without a working compiler train on, only slower."""
    for layer in model.model.layers:
        layer.compile(dynamic=True)
    try:
        step(model, loader, 2, device)
    except Exception as error:  # the compiler may fail in many ways
        print(f"not compiled: {type(error).__name__}: {str(error)[:300]}", flush=True)
        for layer in model.model.layers:
            layer._compiled_call_impl = None
    model.zero_grad(set_to_none=True)


def vocabulary(args: argparse.Namespace) -> Tokenizer:
    if args.start:
        return Tokenizer.from_file(str(args.start / "tokenizer.json"))
    rng = random.Random(args.seed)
    texts = (
        "".join(t for t, _ in pieces(m))
        for m in (sample(rng) for _ in range(min(60_000, args.samples)))
    )
    return train_tokenizer(
        (t.replace("<|im_start|>", "").replace("<|im_end|>", "") for t in texts), VOCAB
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="time for the optimiser alone")
    parser.add_argument("--samples", type=int, default=2_000_000)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--budget", type=int, default=65536, help="tokens in one micro-batch")
    parser.add_argument("--parts", type=int, default=2, help="micro-batches in one step")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument(
        "--steps", type=int, default=0, help="stop after so many steps instead of the time"
    )
    parser.add_argument("--start", type=Path, help="go on from the weights and tokens in a folder")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.monotonic()

    tokenizer = vocabulary(args)
    write_files(args.out, tokenizer)
    print(f"tokenizer after {time.monotonic() - begin:.0f} s", flush=True)
    samples, kinds = build(
        str(args.out / "tokenizer.json"), args.samples, seed=args.seed, workers=args.workers
    )
    print(
        f"{sum(kinds.values())} samples, {samples.tokens / 1e6:.0f} M tokens after {time.monotonic() - begin:.0f} s: {dict(kinds)}",
        flush=True,
    )

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    if args.start:
        model = LlamaForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(config()).float()
    model.to(device).train()
    optimiser = torch.optim.AdamW(
        groups(model, args.decay), lr=args.rate, betas=(0.9, 0.95), fused=device == "cuda"
    )
    loader = Loader(samples, args.budget, device, args.seed)
    if device == "cuda":
        compile_layers(model, loader, device)
        print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    start, last, num_tokens, count, progress = time.monotonic(), time.monotonic(), 0, 0, 0.0
    log = []
    while progress < 1.0:
        for g in optimiser.param_groups:
            g["lr"] = rate(progress, args.rate)
        loss, tokens = step(model, loader, args.parts, device)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        num_tokens += tokens
        count += 1
        if count % 10 == 0 and device == "cuda":
            torch.cuda.synchronize()  # keeps the host from running far ahead of the clock below
        spent = time.monotonic() - start
        progress = count / args.steps if args.steps else spent / (60 * args.minutes)
        if time.monotonic() - last > 15 or progress >= 1.0:
            last = time.monotonic()
            log.append(
                {
                    "step": count,
                    "loss": round(loss.item(), 4),
                    "tokens": num_tokens,
                    "epochs": round(loader.epochs, 2),
                    "seconds": round(spent),
                }
            )
            print(json.dumps(log[-1]), flush=True)

    model.to(torch.bfloat16).eval().save_pretrained(args.out)
    write_files(
        args.out, tokenizer
    )  # again, because save_pretrained writes its own generation config
    print(f"saved after {time.monotonic() - begin:.0f} s", flush=True)
    (args.out / "train.jsonl").write_text("\n".join(map(json.dumps, log)) + "\n")
    print(table(evaluate(args.out, device, args.out / "answers.jsonl")), flush=True)
    print(f"all done after {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()

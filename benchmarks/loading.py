"""How fast a checkpoint becomes a model: one JSON line for each way of loading.

    python benchmarks/loading.py --device cuda --layers 36 --hidden 4096

The checkpoint (a Qwen 3 shape) is written first, so that the page cache holds it: the numbers are
of the copy, not of the disk. ``check`` compares the loaded tensors with those written.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from treadle.api.checkpoints import files_in
from treadle.api.files import ModelFiles
from treadle.plugins import PluginManager
from treadle.testing.attention_reference import ReferenceBackend
from treadle_layers_kit import SingleRankCommunicator
from treadle_worker_kit.build import build_model
from treadle_worker_kit.model_config import read_config

SHARD = 4 << 30


def build(files: ModelFiles, device: str, **options: Any) -> tuple[nn.Module, float]:
    started = perf_counter()
    plugins = PluginManager()
    _, config = read_config(files, plugins)
    model, _ = build_model(
        files,
        config,
        plugins,
        torch.device(device),
        torch.bfloat16 if device != "cpu" else torch.float32,  # bfloat16 is packed on a CPU
        SingleRankCommunicator(),
        lambda request, spec: ReferenceBackend(request),
        **options,
    )
    if device != "cpu":
        torch.cuda.synchronize()
    return model, perf_counter() - started


def write(folder: Path, config: dict[str, Any], model: nn.Module) -> int:
    """Write the parameters under the names of the checkpoint, in shards."""
    (folder / "config.json").write_text(json.dumps(config))
    shards: list[dict[str, torch.Tensor]] = [{}]
    index: dict[str, str] = {}
    size = total = 0
    for name, parameter in model.named_parameters():
        for name_in_shard, tensor in unfused(name, parameter.data, config):
            if size > SHARD:
                shards.append({})
                size = 0
            shards[-1][name_in_shard] = tensor.cpu().contiguous()
            index[name_in_shard] = f"model-{len(shards)}.safetensors"
            size += tensor.nbytes
            total += tensor.nbytes
    for shard_number, shard in enumerate(shards, 1):
        save_file(shard, folder / f"model-{shard_number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return total


def unfused(name: str, data: torch.Tensor, c: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    for fused_name, names, sizes in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj"), [q, kv, kv]),
        ("gate_up_proj", ("gate_proj", "up_proj"), [c["intermediate_size"]] * 2),
    ):
        if fused_name in name:
            tensors = data.split(sizes)
            return [(name.replace(fused_name, t), p) for t, p in zip(names, tensors, strict=True)]
    return [(name, data)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 128,
        "num_key_value_heads": max(1, arguments.hidden // 512),
        "head_dim": 128,
        "vocab_size": arguments.vocab,
    }
    empty = ModelFiles(Path("/nonexistent"), (), config)
    model, seconds = build(empty, arguments.device, load_format="dummy")
    size = sum(p.nbytes for p in model.parameters())
    report("dummy", arguments, size, seconds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write(folder, config, model)
        for _ in range(arguments.repeat):
            loaded, seconds = build(files_in(folder, ["*"], name), arguments.device)
            actual, expected = dict(loaded.named_parameters()), dict(model.named_parameters())
            check = all(torch.equal(actual[n], expected[n]) for n in expected)
            report("safetensors", arguments, size, seconds, check=check)
            del loaded, actual


def report(load_format: str, arguments: Any, size: int, seconds: float, **extra: Any) -> None:
    device = arguments.device
    name = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    gigabytes = size / 1e9
    line = {"what": load_format, "device": name, "gigabytes": round(gigabytes, 2)}
    line |= {"seconds": round(seconds, 2), "gigabytes_per_second": round(gigabytes / seconds, 2)}
    print(json.dumps(line | extra), flush=True)


if __name__ == "__main__":
    main()

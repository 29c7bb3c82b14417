"""Methods of quantization that nothing of treadle reads, and what serves the same model."""

from __future__ import annotations

__all__ = ("advice",)

REPACKED = "treadle-gptq and treadle-awq read the same four bits in their usual packing"
INSTEAD = {
    "aqlm": "its codebooks have no kernel here; use an AWQ or GPTQ checkpoint, or GGUF for 2 to 3 bits",
    "deepspeedfp": "it has a layout of DeepSpeed's own; load the original with --quantization fp8",
    "eetq": "load the original with --quantization fp8, which takes as much memory",
    "exl2": "ExLlama alone reads it; use a GPTQ or AWQ checkpoint, or GGUF for other sizes",
    "exl3": "ExLlama alone reads it; use a GPTQ or AWQ checkpoint, or GGUF for other sizes",
    "higgs": "use an AWQ or GPTQ checkpoint of four bits",
    "ipex": f"{REPACKED}: set --quantization awq or gptq by the tool that wrote it",
    "marlin": f"its words are packed for one kernel; {REPACKED}",
    "gptq_marlin_24": "2:4 sparsity is not served; use a GPTQ checkpoint without it",
    "moe_wna16": f"it names a kernel, not a format; {REPACKED}",
    "neuron_quant": "it is compiled for Neuron devices; load the original with --quantization fp8",
    "qqq": "use a compressed-tensors checkpoint of W8A8, or AWQ for four bits",
    "quanto": "load the original with --quantization fp8, or use an AWQ checkpoint",
    "quip": "use an AWQ or GPTQ checkpoint, or GGUF for 2 to 3 bits",
    "spqr": "use an AWQ or GPTQ checkpoint, or GGUF for 2 to 3 bits",
    "squeezellm": "use an AWQ or GPTQ checkpoint of four bits",
    "tpu_int8": "it is made for TPUs; load the original with --quantization fp8",
    "vptq": "use an AWQ or GPTQ checkpoint, or GGUF for 2 to 3 bits",
}


def advice(method: str) -> str:
    """Return what to do about a method that no plugin provides; empty for an unknown one."""
    text = INSTEAD.get(method.lower().replace("intel/", ""))
    return "" if text is None else f"; treadle has no plugin for it: {text}"

import torch

from treadle import LLM, SamplingParams
from treadle.testing.checkpoints import make_checkpoint
from treadle.testing.plugin import PluginSuite

IDS = list(range(5, 25))


class TestInt8(PluginSuite):
    plugin = "quantization:int8"

    def test_a_model_says_nearly_the_same_in_less_memory(self, tmp_path):
        folder = make_checkpoint(tmp_path, "LlamaForCausalLM")
        options = {"device": "cpu", "dtype": "float32", "num_pages": 32, "cpu_threads": 1}
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        logprobs, sizes = [], []
        for method in (None, "int8"):
            with LLM(str(folder), quantization=method, **options) as llm:
                (output,) = llm.generate({"prompt_token_ids": IDS}, params, use_tqdm=False)
                rows = output.prompt_logprobs[1:]
                logprobs.append(
                    [row[token].logprob for row, token in zip(rows, IDS[1:], strict=True)]
                )
                sizes.append(llm.info.weights_bytes)
        full, quantized = map(torch.tensor, logprobs)
        assert (full - quantized).abs().mean() < 0.05 * full.abs().mean()
        assert not torch.equal(full, quantized)
        assert sizes[1] < 0.6 * sizes[0]

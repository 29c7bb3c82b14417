from treadle.testing.architectures import ModelSuite
from treadle.testing.plugin import PluginSuite


class TestGPT2(PluginSuite, ModelSuite):
    plugin = "models:GPT2LMHeadModel"
    variants = {"plain": {}, "untied": {"tie_word_embeddings": False}, "inner": {"n_inner": 80}}
    ranks = 1

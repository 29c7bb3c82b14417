"""vLLM's names for Python programs, run by treadle.

Objects have the arguments and attributes that they have in vLLM 0.8 to 0.24. What treadle cannot do
raises an error of ``treadle.errors`` that names it.
"""

from treadle import __version__

from .async_llm import AsyncLLM, AsyncLLMEngine
from .engine_args import AsyncEngineArgs, EngineArgs
from .inputs import PromptType, TextPrompt, TokensPrompt
from .llm import LLM
from .llm_engine import LLMEngine
from .outputs import CompletionOutput, RequestOutput
from .sampling_params import SamplingParams

__all__ = (
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
)

"""Prompts in the forms that vLLM takes them."""

from treadle.text.prompts import PromptInput as PromptType
from treadle.text.prompts import TextPrompt, TokensPrompt

__all__ = ("PromptType", "TextPrompt", "TokensPrompt")

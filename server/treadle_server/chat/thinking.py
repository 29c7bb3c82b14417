"""Whether and how a chat thinks: the four spellings in use, as arguments of the chat template."""

from __future__ import annotations

from typing import Any

from treadle.errors import RequestError
from treadle.text.chat import THINKING_SWITCHES
from treadle_server.wire.chat import ChatRequest

__all__ = ("budget_of", "hides_reasoning", "thinking_arguments")


def thinking_arguments(request: ChatRequest) -> dict[str, Any]:
    """Return the template arguments; none if the request leaves it to the template.

    Raises ``RequestError`` if it says both that the model shall think and that it shall not.
    """
    effort = effort_of(request)
    is_on: dict[str, bool] = {}
    if effort is not None:
        is_on["reasoning_effort"] = effort != "none"
    if request.reasoning is not None and request.reasoning.enabled is not None:
        is_on["reasoning.enabled"] = request.reasoning.enabled
    if request.thinking is not None:
        is_on["thinking"] = request.thinking.type != "disabled"
    if len(set(is_on.values())) > 1:
        raise RequestError(
            f"{' and '.join(is_on)} contradict each other on whether to think; send one of them",
            param=next(iter(is_on)),
        )
    arguments: dict[str, Any] = {}
    if is_on:
        arguments = dict.fromkeys(THINKING_SWITCHES, next(iter(is_on.values())))
    if effort is not None:
        arguments["reasoning_effort"] = effort
    if (budget := budget_of(request)) is not None:
        arguments["thinking_budget"] = budget
    return arguments


def effort_of(request: ChatRequest) -> str | None:
    options = request.reasoning
    nested = None if options is None else options.effort
    efforts = {effort for effort in (request.reasoning_effort, nested) if effort is not None}
    if len(efforts) > 1:
        raise RequestError(
            "reasoning_effort and reasoning.effort differ; send one of them",
            param="reasoning.effort",
        )
    effort = next(iter(efforts), None)
    if effort is not None and len(effort) > 64:
        raise RequestError("reasoning.effort has more than 64 characters", param="reasoning.effort")
    return effort


def budget_of(request: ChatRequest) -> int | None:
    """Return how many tokens the thinking should take: templates like that of Seed-OSS tell the model, too."""
    if request.thinking is not None and request.thinking.budget_tokens is not None:
        return request.thinking.budget_tokens
    return None if request.reasoning is None else request.reasoning.max_tokens


def hides_reasoning(request: ChatRequest) -> bool:
    """Whether the reasoning is left out of the answer."""
    options = request.reasoning
    return request.include_reasoning is False or bool(options and options.exclude)

"""``treadle generate``: complete prompts from flags or standard input."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.api import impl
from treadle.errors import ConfigError, EngineError
from treadle_cli.explain import Flag, print_engine
from treadle_cli.flags import COMPLETION, ENGINE, Options, with_flags
from treadle_cli.help import single_command
from treadle_cli.sampling import sampling_params

if TYPE_CHECKING:
    from treadle.api.sampling_params import SamplingParams
    from treadle.entrypoints.llm import LLM

__all__ = ("generate", "treadle_command")

MAX_TOKENS = 256


@with_flags(*ENGINE, COMPLETION)
def generate(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", help="Text to complete (default: standard input). Repeatable."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print each request as one JSON line when it is done.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats/--no-stats", help="Print token counts and speed at the end.")
    ] = False,
    explain: Flag = False,
    options: Options,
) -> None:
    """Complete a prompt, streaming to the terminal.

    Without --max-tokens at most 256 tokens are generated. Several prompts, or --n above 1, run as
    one batch and are printed when they are done: with --json each at once, in whatever order they
    end, otherwise all at the end.
    """
    if explain:
        return print_engine(options.engine_config())
    prompts = prompt or [_standard_input()]
    options.struct(COMPLETION)  # a bad value is reported before the model is loaded
    engine = options.engine()
    from treadle_cli.terminal import Screen

    Screen().wait_for(options.engine_config().model.model)
    from treadle import LLM

    with LLM(**engine) as llm:
        params = sampling_params(llm, options, max_tokens=MAX_TOKENS)
        if json:
            _print_json(llm, prompts, params)
        elif len(prompts) == 1 and params.n == 1:
            _stream(llm, prompts[0], params, stats)
        else:
            _print_batch(llm, prompts, params)


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ConfigError("there is no prompt; give --prompt TEXT or pipe text to standard input")
    text = sys.stdin.read()
    if not text:
        raise ConfigError("standard input is empty; give --prompt TEXT or pipe text to it")
    return text


def _stream(llm: LLM, prompt: str, params: SamplingParams, stats: bool) -> None:
    from treadle_cli.terminal import Screen, follow

    screen = Screen()
    answer = follow(llm.stream(prompt, params.replace(output_kind="delta")), screen)
    screen.line()
    if stats:
        screen.note(answer.summary())
    if answer.error is not None:
        raise EngineError(answer.error)
    if answer.stopped:
        raise KeyboardInterrupt


def _print_batch(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    from treadle_cli.terminal import Screen

    screen = Screen()
    results = llm.generate(prompts, params, use_tqdm=False)
    total = sum(len(result.outputs) for result in results)
    number = 0
    for result in results:
        for output in result.outputs:
            number += 1
            screen.line(f"==> {number}/{total} <==")
            screen.line(output.text)
            if output.error is not None:
                screen.note(output.error)


def _print_json(llm: LLM, prompts: list[str], params: SamplingParams) -> None:
    import msgspec

    for result in llm.stream(prompts, params.replace(output_kind="final")):
        print(msgspec.json.encode(result).decode(), flush=True)


@impl
def treadle_command(name: str) -> typer.Typer | None:
    return single_command(name, generate) if name == "generate" else None

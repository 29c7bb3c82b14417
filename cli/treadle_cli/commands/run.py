"""``treadle run``: complete the prompts of a file with the engine of this program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle.api import impl
from treadle.config import EngineConfig
from treadle.errors import ConfigError
from treadle_cli.explain import Flag, print_engine
from treadle_cli.flags import ENGINE, SAMPLING, Options, with_flags
from treadle_cli.help import single_command
from treadle_cli.offline import need_server

__all__ = ("run", "treadle_command")

MAX_TOKENS = 256


@with_flags(*ENGINE, SAMPLING)
def run(
    *,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The prompts.", show_default=False)
    ] = None,
    explain: Flag = False,
    options: Options,
) -> None:
    """Complete a file of prompts, and print each answer as one JSON line when it is there.

    A line of the file is a prompt. In a file that ends in .jsonl it is an object with prompt or
    messages, and perhaps parameters, which win over flags. Answers come in the order in which they
    are complete; line says to which line one belongs. Without --max-tokens at most 256 tokens are
    generated for each.
    """
    file, options = file_and_options(file, options)
    engine = options.engine_config()
    if explain:
        return print_engine(engine)
    if file is None:
        raise ConfigError("there is no file of prompts; write treadle run [MODEL] FILE")
    options.struct(SAMPLING)  # a bad value is reported before the model is loaded
    check_file(file)
    answer_prompts(engine, file, {"max_tokens": MAX_TOKENS, **options.of([SAMPLING])})


def file_and_options(file: Path | None, options: Options) -> tuple[Path | None, Options]:
    """Return the file and the options: a single argument is the file, not the model."""
    if file is not None or "model" not in options.values:
        return file, options
    values = dict(options.values)
    return Path(values.pop("model")), Options(values)


def check_file(file: Path) -> None:
    """Raise ``ConfigError`` before the model is loaded."""
    try:
        with file.open("rb") as opened:
            is_empty = not opened.read(1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    if is_empty:
        raise ConfigError(f"{file} is empty; write one prompt on each line")


def answer_prompts(engine: EngineConfig, file: Path, fields: dict[str, object]) -> None:
    from treadle_cli.prompt_file import AnswerPrinter, PromptFile
    from treadle_server.batches.offline import answer_lines
    from treadle_server.config import ServerConfig

    source = PromptFile(file, fields, ServerConfig().max_body_bytes)
    answer_lines(engine, source, AnswerPrinter())


@impl
def treadle_command(name: str) -> typer.Typer | None:
    if name != "run":
        return None
    need_server(name)
    return single_command(name, run)

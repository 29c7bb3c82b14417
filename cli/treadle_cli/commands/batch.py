"""``treadle batch``: answer the requests of a file with the engine of this program."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.api import impl
from treadle.errors import ConfigError
from treadle_cli.explain import Flag, print_engine
from treadle_cli.flags import ENGINE, Options, with_flags
from treadle_cli.help import single_command
from treadle_cli.offline import need_server, progress_bar

if TYPE_CHECKING:
    from treadle_server.batches.wire import BatchCounts

__all__ = ("batch", "treadle_command")


@with_flags(*ENGINE)
def batch(
    *,
    input_file: Annotated[
        Path | None,
        typer.Option("--input-file", "-i", metavar="FILE.jsonl", help="The requests, one a line."),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option("--output-file", "-o", metavar="FILE.jsonl", help="The answers, one a line."),
    ] = None,
    explain: Flag = False,
    options: Options,
) -> None:
    """Answer the requests of a file, in the batch format of the OpenAI API.

    Each answer is written when it is there. After Ctrl-C or a crash, the same command continues: it
    keeps the answers in the output file, and runs the other requests.
    """
    engine = options.engine_config()
    if explain:
        return print_engine(engine)
    if input_file is None or output_file is None:
        raise ConfigError("give the requests with -i FILE.jsonl and the answers with -o FILE.jsonl")
    from treadle_server.batches.journal import JournalError
    from treadle_server.batches.offline import answer_file

    counts: BatchCounts | None = None
    try:
        with progress_bar("requests") as bar:

            def on_progress(now: BatchCounts) -> None:
                nonlocal counts
                counts = now
                bar.total = now.total
                bar.update(now.completed + now.failed - bar.n)

            total = answer_file(engine, input_file, output_file, on_progress).total
    except JournalError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{error.filename or output_file}: {error.strerror}") from error
    finally:
        if counts is not None and counts.total:
            text = (
                f"{counts.completed} completed, {counts.failed} failed, of {counts.total} requests"
            )
            print(text, file=sys.stderr)
    if not total:
        raise ConfigError(f"{input_file} has no request; write one JSON object on each line")


@impl
def treadle_command(name: str) -> typer.Typer | None:
    if name not in ("batch", "run-batch"):
        return None
    need_server(name)
    return single_command(name, batch)

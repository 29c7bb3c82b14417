"""``treadle quantize``: what it is told, and what it prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from treadle.errors import ConfigError
from treadle.loading import fetch, parse_ref
from treadle.plugins import PluginManager

if TYPE_CHECKING:
    from treadle_command_quantize.conversion import Converted

__all__ = ("application",)


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, org/name, or scheme:path.")
    ],
    method: Annotated[
        Literal["fp8", "int8", "int4"],
        typer.Option("--method", "-m", help="How the weights are stored."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; it must not exist.")
    ],
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", help="Inputs that share a scale; for int4 (default: 128)."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore", help="A module to leave as it is, like mlp.down_proj; may be repeated."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit.")
    ] = None,
    load_format: Annotated[
        str, typer.Option("--load-format", help="Format of the weights to read.")
    ] = "auto",
) -> None:
    """Write a quantized copy of a model, and print the error of each matrix.

    No method needs calibration. The matrices are those that the model's plugin would quantize.
    """
    if group_size is not None and (method != "int4" or group_size < 1 or group_size % 8):
        raise ConfigError(
            f"--group-size is {group_size} with --method {method}; it is for int4, and a multiple of 8"
        )
    if output.exists() or output.is_symlink():
        raise ConfigError(f"--output {output} exists; name a folder that does not")
    plugins = PluginManager()
    files = fetch(plugins, parse_ref(model, revision, None), load_format)

    from tqdm import tqdm

    from treadle_command_quantize.conversion import convert
    from treadle_command_quantize.rounding import recipe_of

    recipe = recipe_of(method, group_size or 128)
    with tqdm(unit=" tensors", dynamic_ncols=True, disable=not sys.stderr.isatty()) as bar:

        def on_matrix(name: str, error: float) -> None:
            bar.write(f"{name}  {error:.2%}", file=sys.stdout)

        def on_tensor(total: int) -> None:
            bar.total = total
            bar.update()

        result = convert(
            plugins,
            files,
            output,
            recipe,
            tuple(ignore or ()),
            load_format=load_format,
            on_matrix=on_matrix,
            on_tensor=on_tensor,
        )
    print(_summary(result, output))


def _summary(result: Converted, output: Path) -> str:
    from treadle_worker_kit.memory import size_text

    worst = max(result.errors, key=lambda name: result.errors[name])
    mean = sum(result.errors.values()) / len(result.errors)
    lines = [
        f"{output}: {size_text(result.new_bytes)} instead of {size_text(result.old_bytes)}, "
        f"{len(result.errors)} matrices quantized, relative error {mean:.2%} on average, "
        f"{result.errors[worst]:.2%} at most ({worst})"
    ]
    if result.left:
        lines.append(f"left as they are: {', '.join(result.left)}")
    return "\n".join(lines)


def application() -> typer.Typer:
    """The application of this one command, in plain text like the others of ``treadle``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command("quantize")(quantize)
    return app

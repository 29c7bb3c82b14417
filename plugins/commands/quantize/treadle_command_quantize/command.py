"""``treadle quantize``: what it is told, and what it prints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from treadle.errors import ConfigError
from treadle.loading import fetch, parse_ref
from treadle.plugins import PluginManager

if TYPE_CHECKING:
    from treadle.api.files import ModelFiles
    from treadle_command_quantize.conversion import Converted

__all__ = ("application",)

CALIBRATED = ("awq", "gptq")


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, org/name, or scheme:path.")
    ],
    method: Annotated[
        Literal["fp8", "int8", "int4", "awq", "gptq"],
        typer.Option("--method", "-m", help="How the weights are stored."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; it must not exist.")
    ],
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size", help="Inputs that share a scale; of four bits (default: 128)."
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore", help="A module to leave as it is, like mlp.down_proj; may be repeated."
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", help="Texts for awq and gptq: plain, or .jsonl with text in each line."
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

    fp8, int8 and int4 need no calibration, and quantize the matrices that the model's plugin would. awq and gptq
    are computed by llm-compressor, from texts, and the error is that of each layer.
    """
    four_bits = method in ("int4", *CALIBRATED)
    if group_size is not None and (not four_bits or group_size < 1 or group_size % 8):
        raise ConfigError(
            f"--group-size is {group_size} with --method {method}; it is for int4, awq and gptq, and a "
            "multiple of 8"
        )
    if (calibration is not None) != (method in CALIBRATED):
        raise ConfigError(
            f"--method {method} {'needs' if method in CALIBRATED else 'takes no'} --calibration: a file of "
            "texts is for awq and gptq, which look at what a model does with them"
        )
    if output.exists() or output.is_symlink():
        raise ConfigError(f"--output {output} exists; name a folder that does not")
    texts = None
    if calibration is not None:
        from treadle_command_quantize.calibration import read_texts

        texts = read_texts(calibration)
    plugins = PluginManager()
    files = fetch(plugins, parse_ref(model, revision, None), load_format)

    if method == "awq" or method == "gptq":
        print(_summary(_calibrated(files, output, method, texts, group_size, ignore), output))
        return
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


def _calibrated(
    files: ModelFiles,
    output: Path,
    method: Any,
    texts: list[str] | None,
    group_size: int | None,
    ignore: list[str] | None,
) -> Converted:
    from treadle_command_quantize.calibration import Calibration, calibrate

    recipe = Calibration(method, group_size or 128, tuple(ignore or ()))
    # llm-compressor draws the bar of the layers itself.
    return calibrate(files, output, recipe, texts or (), lambda name, e: print(f"{name}  {e:.2%}"))


def _summary(result: Converted, output: Path) -> str:
    from treadle_worker_kit.memory import size_text

    worst = max(result.errors, key=lambda name: result.errors[name])
    mean = sum(result.errors.values()) / len(result.errors)
    lines = [
        f"{output}: {size_text(result.new_bytes)} instead of {size_text(result.old_bytes)}, "
        f"{len(result.errors)} {_counted(result)} quantized, relative error {mean:.2%} on average, "
        f"{result.errors[worst]:.2%} at most ({worst})"
    ]
    if result.left:
        lines.append(f"left as they are: {', '.join(result.left)}")
    return "\n".join(lines)


def _counted(result: Converted) -> str:
    return "layers" if all(name.startswith("layer ") for name in result.errors) else "matrices"


def application() -> typer.Typer:
    """The application of this one command, in plain text like the others of ``treadle``."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command("quantize")(quantize)
    return app

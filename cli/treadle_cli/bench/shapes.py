"""Shapes of models to measure without their weights: folders that hold a ``config.json``."""

from __future__ import annotations

from pathlib import Path

from treadle.errors import ConfigError

__all__ = ("known_shapes", "shape_folder")


def shape_folder(name: str) -> Path:
    """The folder of a shape: a ``config.json``, its folder, or a name of ``benchmarks/shapes``."""
    path = Path(name).expanduser()
    for folder in (path.parent if path.name == "config.json" else path, known_shapes().get(name)):
        if folder is not None and (folder / "config.json").is_file():
            return folder
    shape_names = (
        ", ".join(known_shapes()) or "none here, run in a checkout of treadle to have some"
    )
    raise ConfigError(
        f"--hf-config is {name!r}: no config.json there; give a config.json, its folder, or one of: {shape_names}"
    )


def known_shapes() -> dict[str, Path]:
    """The shapes of the checkout around this file or around the working directory."""
    roots = [Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents]
    shapes: dict[str, Path] = {}
    for root in roots:
        for file in sorted(root.glob("benchmarks/shapes/*/config.json")):
            shapes.setdefault(file.parent.name, file.parent)
    return shapes

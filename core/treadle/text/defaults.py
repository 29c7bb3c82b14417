"""The sampling parameters of requests that name none: the checkpoint's ``generation_config.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.api.checkpoints import read_json
from treadle.api.sampling_params import SamplingParams
from treadle.config import ModelConfig
from treadle.errors import ConfigError, RequestError

__all__ = ("default_params",)

# What a generation_config.json says about sampling, and our name for it.
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_params(config: ModelConfig, root: Path) -> tuple[SamplingParams, int | None]:
    """The default parameters, and the most output tokens that the checkpoint allows, if it says.

    ``root`` is the checkpoint's folder. Raises ``ConfigError`` for an unknown or impossible value.
    """
    given = {k: v for k, v in _file(config, root).items() if k in SAMPLING and v is not None}
    given |= config.override_generation_config
    fields: dict[str, Any] = {}
    for name, value in given.items():
        field = SAMPLING.get(name, name)
        if field not in SamplingParams.__struct_fields__:
            raise ConfigError(
                f"override_generation_config holds {name!r}, which is no sampling parameter; known: "
                f"{', '.join(sorted({*SAMPLING, *SamplingParams.__struct_fields__}))}"
            )
        fields[field] = value
    try:
        return SamplingParams(**fields), given.get("max_new_tokens")
    except RequestError as error:
        raise ConfigError(
            f"the default sampling parameters (generation_config.json, override_generation_config) "
            f"cannot be used: {error}. Set generation_config=treadle to ignore the checkpoint's"
        ) from error


def _file(config: ModelConfig, root: Path) -> dict[str, Any]:
    match config.generation_config:
        case "treadle" | "vllm":  # the name that users of vLLM type
            return {}
        case "auto":
            return read_json(root / "generation_config.json")
        case folder:
            path = Path(folder).expanduser() / "generation_config.json"
            if not path.is_file():
                raise ConfigError(
                    f"option generation_config is {folder!r}: {path} does not exist; give auto, treadle "
                    "or a folder that holds the file"
                )
            return read_json(path)

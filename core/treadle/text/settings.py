"""What lies beside ``tokenizer.json``: special tokens, chat templates, default sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.errors import CheckpointError

__all__ = (
    "TOKENIZER_FILES",
    "TOKENIZER_PATTERNS",
    "TokenizerSettings",
    "has_tokenizer",
    "read_json",
)

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Any of these lets a tokenizer be built.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "*.tiktoken",
)
# Everything that the frontend reads of a checkpoint.
TOKENIZER_PATTERNS = (
    *TOKENIZER_FILES,
    "merges.txt",
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
)


def has_tokenizer(root: Path) -> bool:
    return any(any(root.glob(pattern)) for pattern in TOKENIZER_FILES)


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty if there is no such file. Raises ``CheckpointError``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds {type(found).__name__}, not an object")
    return found


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """``special`` maps names (``eos_token``) to texts; templates read them by these names.

    ``add_bos_token`` and ``add_eos_token`` are not among them: where there is a ``tokenizer.json``,
    its post-processor decides, as in transformers.
    """

    special: Mapping[str, str] = field(default_factory=dict)
    extra_special: tuple[str, ...] = ()
    added: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> TokenizerSettings:
        """Raises ``CheckpointError`` for a damaged file."""
        config = read_json(root / "tokenizer_config.json")
        names = read_json(root / "special_tokens_map.json") | config
        special = {name: text for name in NAMED if (text := _text(names.get(name)))}
        extra = names.get("extra_special_tokens") or names.get("additional_special_tokens") or ()
        if isinstance(extra, dict):
            special |= {str(name): text for name, value in extra.items() if (text := _text(value))}
            extra = ()
        return cls(
            special=special,
            extra_special=tuple(text for value in extra if (text := _text(value))),
            added=_added(config.get("added_tokens_decoder"), root),
            templates=_templates(root, config),
        )


def _text(value: Any) -> str | None:
    """A token is written as its text or as ``{"content": text}``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _added(table: Any, root: Path) -> dict[int, Mapping[str, Any]]:
    if not isinstance(table, dict):
        return {}
    try:
        return {int(token): entry for token, entry in table.items() if _text(entry)}
    except ValueError as error:
        raise CheckpointError(
            f"{root / 'tokenizer_config.json'}: added_tokens_decoder has a key that is no id: {error}"
        ) from error


def _templates(root: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; files win over ``tokenizer_config.json``."""
    found: dict[str, str] = {}
    match config.get("chat_template"):
        case str(text):
            found["default"] = text
        case list(entries):
            for entry in entries:
                if isinstance(entry, dict) and {"name", "template"} <= entry.keys():
                    found[str(entry["name"])] = str(entry["template"])
    legacy = read_json(root / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    if (main := root / "chat_template.jinja").is_file():
        found["default"] = main.read_text(encoding="utf-8")
    for path in sorted(root.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    return found

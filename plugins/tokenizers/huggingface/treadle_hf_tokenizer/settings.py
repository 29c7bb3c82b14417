"""What lies beside ``tokenizer.json``: special tokens and chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.api.checkpoints import read_json, read_text
from treadle.errors import CheckpointError

__all__ = ("TokenizerSettings",)

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """``special`` maps names (``eos_token``) to texts; templates read them by these names.

    ``add_bos_token`` and ``add_eos_token`` are not among them: where there is a ``tokenizer.json``,
    its post-processor decides, as in transformers.
    """

    special: Mapping[str, str] = field(default_factory=dict)
    extra_special: tuple[str, ...] = ()
    added_tokens: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    templates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, root: Path) -> TokenizerSettings:
        """Raises ``CheckpointError`` for a damaged file."""
        config = read_json(root, "tokenizer_config.json")
        names = read_json(root, "special_tokens_map.json") | config
        special = {name: text for name in NAMED if (text := _text(names.get(name)))}
        extra = names.get("extra_special_tokens") or names.get("additional_special_tokens") or ()
        if isinstance(extra, dict):
            special |= {str(name): text for name, value in extra.items() if (text := _text(value))}
            extra = ()
        return cls(
            special=special,
            extra_special=tuple(text for value in extra if (text := _text(value))),
            added_tokens=_added_tokens(config.get("added_tokens_decoder"), root),
            templates=_templates(root, config),
        )


def _text(value: Any) -> str | None:
    """A token is written as its text or as ``{"content": text}``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _added_tokens(table: Any, root: Path) -> dict[int, Mapping[str, Any]]:
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
    templates: dict[str, str] = {}
    match config.get("chat_template"):
        case str(text):
            templates["default"] = text
        case list(entries):
            for entry in entries:
                if isinstance(entry, dict) and {"name", "template"} <= entry.keys():
                    templates[str(entry["name"])] = str(entry["template"])
    old_template = read_json(root, "chat_template.json").get("chat_template")
    if isinstance(old_template, str):
        templates["default"] = old_template
    extra = sorted(root.glob("additional_chat_templates/*.jinja"))
    files = {path.stem: path.relative_to(root).as_posix() for path in extra}
    for name, file in {"default": "chat_template.jinja", **files}.items():
        template = read_text(root, file)
        if template is not None:
            templates[name] = template
    return templates

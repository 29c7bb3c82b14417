"""Which chat renderer a model gets: ``auto`` takes the one that is made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from treadle_jinja.renderer import JinjaRenderer

from treadle.config import from_options
from treadle.errors import PluginConflictError, PluginNotFoundError
from treadle.plugins import PluginManager
from treadle.testing.checkpoints import make_tokenizer
from treadle.text.assets import FrontendAssets, open_checkpoint, plugin_config

PLUGIN = """
from treadle.api import impl
from treadle.api.matching import Match

TREADLE = {"renderers": ["mine"]}


class Mine:
    def render(self, messages, **options):
        return ""

    def encode(self, messages, **options):
        return []


@impl
def treadle_renderer(mode):
    return Mine() if mode == "mine" else None


@impl
def treadle_match(kind, key, model):
    if (kind, key) == ("renderers", "mine") and model.config.get("model_type") == "mine":
        return Match(SCORE, "its model_type is mine")
"""


def open_assets(
    folder: Path, score: int = 100, source: str = PLUGIN, **options: Any
) -> FrontendAssets:
    file = folder / "plugin.py"
    file.write_text(source.replace("SCORE", str(score)))
    config = from_options(model=str(make_tokenizer(folder)), plugin_file=[str(file)], **options)
    return open_checkpoint(config, PluginManager(plugin_config(config)))


def create_renderer(folder: Path, *arguments: Any, **options: Any) -> Any:
    """What the plugin has made, without the guard around it."""
    renderer: Any = open_assets(folder, *arguments, **options).renderer
    return renderer._object


OURS = {"hf_overrides": {"model_type": "mine"}}


def test_the_one_that_is_made_for_the_model_is_taken(tmp_path: Path) -> None:
    assert type(create_renderer(tmp_path, **OURS)).__name__ == "Mine"


def test_any_other_model_gets_its_own_template(tmp_path: Path) -> None:
    assert isinstance(create_renderer(tmp_path), JinjaRenderer)
    options = {"hf_overrides": {"model_type": "other"}}
    assert isinstance(create_renderer(tmp_path, **options), JinjaRenderer)


@pytest.mark.parametrize("options", [{}, {"renderer": "jinja"}, {"chat_template": "{{ 1 }}"}])
def test_templates_run_in_a_process_with_limits(tmp_path: Path, options: dict[str, Any]) -> None:
    assert create_renderer(tmp_path, **options)._isolated is not None


def test_a_name_and_a_template_count_more(tmp_path: Path) -> None:
    assert isinstance(create_renderer(tmp_path, renderer="jinja", **OURS), JinjaRenderer)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    renderer = create_renderer(tmp_path, chat_template=template, **OURS)
    assert isinstance(renderer, JinjaRenderer)
    assert renderer.render([{"role": "user", "content": "hi"}]) == "hi"
    assert type(create_renderer(tmp_path, renderer="mine")).__name__ == "Mine"


def test_of_a_tie_treadles_own_is_used(tmp_path: Path) -> None:
    assert isinstance(create_renderer(tmp_path, 10, **OURS), JinjaRenderer)
    assert type(create_renderer(tmp_path, 11, **OURS)).__name__ == "Mine"


def test_a_tie_of_strangers_is_an_error(tmp_path: Path) -> None:
    """No engine starts without a renderer."""
    twins = {'["mine"]': '["mine", "twin"]', '(kind, key) == ("renderers", "mine")': "True"}
    source = PLUGIN
    for old, new in twins.items():
        source = source.replace(old, new)
    with pytest.raises(
        PluginConflictError, match=r"--renderer NAME:\n  mine from .*\n  twin from "
    ):
        open_assets(tmp_path, source=source, **OURS)


def test_without_any_renderer(tmp_path: Path) -> None:
    with pytest.raises(PluginNotFoundError, match="a chat renderer is needed: no installed"):
        open_assets(tmp_path, disable_plugin=["renderers:jinja"])

"""What a plugin promises that says which models it is made for (``treadle_match``).

::

    class TestMine(PluginSuite, ToolParserSuite):
        plugin = "tool_parsers:mine"
        matched = [ModelTraits(templates={"default": "{{ messages }}<call>"})]
        unmatched = [ModelTraits(templates={"default": "{{ messages }}<function=call>"})]

Part of the suites of parsers. A plugin that is chosen by name only has nothing to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from treadle.api.matching import Match, ModelTraits
from treadle.plugins import PluginManager
from treadle.testing.introspection import hooks_of
from treadle.testing.plugin import FOREIGN, PluginTest

__all__ = ("PLAIN", "Matching")

PLAIN = (
    ModelTraits(),
    ModelTraits(
        config={"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        templates={
            "default": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        },
        tokens=frozenset({"<|im_start|>", "<|im_end|>", "<unk>", "<s>", "</s>"}),
    ),
    ModelTraits(config={"architectures": None, "model_type": "gpt2", "quantization_config": None}),
)
"""Models that call no tools and do not reason."""


class Matching(PluginTest):
    """Checks of ``treadle_match``: ``matched`` are models of the plugin, ``unmatched`` similar ones."""

    matched: ClassVar[Sequence[ModelTraits]] = ()
    unmatched: ClassVar[Sequence[ModelTraits]] = ()

    def test_it_matches_its_models(self) -> None:
        plugins = self._matching()
        if not self.matched:
            pytest.skip("it was given no models that it matches")
        for model in self.matched:
            assert self._match(plugins, model) is not None, f"no match: {model}"

    def test_it_leaves_other_models_alone(self) -> None:
        """A plugin that matches every model would be chosen for all models without a better match."""
        plugins = self._matching()
        for model in (*PLAIN, *self.unmatched):
            assert self._match(plugins, model) is None, f"it matches {model}"

    def test_it_matches_under_its_own_key_only(self) -> None:
        """A module may serve several keys; the hook is called for each of them."""
        hooks: Any = self._matching().hooks_for(self.kind, self.key)
        for kind, key in ((self.kind, FOREIGN), (FOREIGN, self.key)):
            for model in self.matched:
                match = hooks.treadle_match(kind=kind, key=key, model=model, options={})
                assert match is None, f"it answered {match!r} for {kind}:{key}"

    def test_its_reason_can_be_shown(self) -> None:
        """The reason is printed on one line of ``treadle serve --explain``."""
        plugins = self._matching()
        for model in self.matched:
            match: Any = self._match(plugins, model)
            if match is not None:
                assert isinstance(match, Match) and match.score > 0
                assert 8 <= len(match.reason) <= 80 and match.reason.isprintable()

    def _match(self, plugins: PluginManager, model: ModelTraits) -> Any:
        options = plugins.options(self.kind, self.key)
        hooks: Any = plugins.hooks_for(self.kind, self.key)
        return hooks.treadle_match(kind=self.kind, key=self.key, model=model, options=options)

    def _matching(self) -> PluginManager:
        plugins = self.plugin_manager()
        if self.key not in plugins.keys(self.kind):
            pytest.skip("it is not installed")
        if "treadle_match" not in hooks_of(plugins, plugins.load(self.kind, self.key))[0]:
            pytest.skip("it is chosen by name only")
        return plugins

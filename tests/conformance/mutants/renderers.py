"""A renderer that marks who speaks with a special token, and what may be wrong with one."""

from __future__ import annotations

from mutants.specimen import Mutant, Specimen
from treadle.testing.text import RendererSuite

SOURCE = """
import re

from treadle.api import impl

TREADLE = {"renderers": ["mine"]}
MARK = "<|end|>"


class Prompt(str):
    parts = ()


class Mine:
    calls = 0

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.marks = [
            tokenizer.decode([i], skip_special_tokens=False) for i in tokenizer.special_token_ids
        ]

    def render(
        self,
        messages,
        *,
        tools=None,
        add_generation_prompt=True,
        continue_final_message=False,
        template_arguments=None,
    ):
        self.calls += 1
        parts = []
        for message in messages:
            parts += [f"{message['role']}: ", message["content"], MARK]
        if continue_final_message:
            del parts[-1]
        if add_generation_prompt:
            parts += ["assistant: "]
        prompt = Prompt("".join(parts))
        prompt.parts = parts
        return prompt

    def encode(self, prompt):
        ids = []
        for part in prompt.parts:
            # What no template wrote is cut where a marker would begin.
            pieces = [part] if part == MARK else re.split("(?<=<)", part)
            for piece in pieces:
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
        return ids


@impl
def treadle_renderer(mode, tokenizer):
    return Mine(tokenizer) if mode == "mine" else None
"""

SPECIMENS = (
    Specimen(
        suite=RendererSuite,
        plugin="renderers:mine",
        source=SOURCE,
        mutants=(
            Mutant(
                "test_what_was_said_is_in_the_prompt_in_order",
                {"in messages:": "in [*messages[1::-1], *messages[2:]]:"},
            ),
            Mutant(
                "test_the_answer_is_opened_only_when_asked",
                {"if add_generation_prompt:": "if not continue_final_message:"},
            ),
            Mutant(
                "test_a_last_message_can_be_continued", {"if continue_final_message:": "if False:"}
            ),
            Mutant(
                "test_rendering_twice_gives_the_same",
                {'"assistant: "': 'f"assistant {self.calls}: "'},
            ),
            Mutant(
                "test_messages_are_left_as_they_are",
                {"in messages:": "in messages:\n            message.setdefault('name', '')"},
            ),
            Mutant("test_it_takes_tools_and_arguments", {"        tools=None,\n": ""}),
            Mutant(
                "test_it_takes_tools_and_arguments",
                {"parts = []": "parts = []\n        messages = messages[bool(tools) :]"},
            ),
            Mutant("test_encoding_loses_nothing", {"in pieces:": "in map(str.strip, pieces):"}),
            Mutant(
                "test_prompts_do_not_meet",
                {"prompt.parts = parts": "self.parts = parts", "prompt.parts:": "self.parts:"},
            ),
            Mutant("test_a_marker_in_a_message_stays_text", {'re.split("(?<=<)", part)': "[part]"}),
        ),
    ),
)

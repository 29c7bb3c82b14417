"""Prompts and parameters become checked engine requests, or errors that say what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import templates
import vocabularies
from treadle_hf_tokenizer.tokenizer import AutoTokenizer
from treadle_jinja.renderer import JinjaRenderer

from treadle.api.sampling_params import SamplingParams
from treadle.api.step_types import EngineInfo
from treadle.config import from_options
from treadle.errors import CheckpointError, ConfigError, ContextLengthError, RequestError
from treadle.plugins import PluginManager
from treadle.text.assets import FrontendAssets, default_params, open_checkpoint, plugin_config
from treadle.text.chat import Conversation
from treadle.text.input_processor import InputProcessor
from treadle.text.prompts import Prompt, parse_prompt, parse_prompts

TOKENIZER = AutoTokenizer(vocabularies.byte_level())
INFO = EngineInfo(
    model="m", architecture="A", dtype="float32", device="cpu", vocab_size=TOKENIZER.vocab_size,
    max_model_len=64, page_size=16, kv_cache_groups=[], num_async_steps=0, eos_token_ids=[2],
)  # fmt: skip


def processor(**changes: Any) -> InputProcessor:
    renderer = JinjaRenderer(TOKENIZER, templates={"default": templates.TRAINING})
    arguments = {"guarded_tokenizer": TOKENIZER, "renderer": renderer} | changes
    return InputProcessor(INFO, FrontendAssets(TOKENIZER, **arguments))


# ------------------------------------------------------------------ prompts


def test_every_form_of_a_prompt_means_the_same() -> None:
    ids = TOKENIZER.encode("Hello")
    forms = [
        "Hello",
        {"prompt": "Hello"},
        ids,
        {"prompt_token_ids": ids},
        tuple(ids),
        Prompt(text="Hello"),
    ]
    for form in forms:
        assert processor().prepare(parse_prompt(form)).prompt_ids == ids
    assert [p.text for p in parse_prompts(["a", {"prompt": "b"}, [1, 2]])] == ["a", "b", None]
    assert (
        len(parse_prompts("Hello"))
        == len(parse_prompts(ids))
        == len(parse_prompts({"prompt": "x"}))
        == 1
    )
    assert parse_prompts([]) == []
    prompt = parse_prompt({"prompt": "shown", "prompt_token_ids": ids})
    assert (
        processor().prepare(prompt).prompt == "shown"
        and processor().prepare(prompt).prompt_ids == ids
    )


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (None, "NoneType"),
        (7, "int"),
        (b"bytes", "bytes"),
        ({"promt": "x"}, "'promt'"),
        ({}, "neither"),
        ({"prompt": 3}, "must be text"),
        ({"prompt_token_ids": "12"}, "list of whole numbers"),
        ({"prompt_token_ids": [1, "2"]}, "'2'"),
        ([1, True], "True"),
        ([1, 2.0], "2.0"),
        (["a", None], "NoneType"),
        ([["a"]], "'a'"),
    ],
)
def test_what_is_not_a_prompt(form: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as exc_info:
        parse_prompts(form)
    assert str(exc_info.value.param).startswith("prompt")


# ------------------------------------------------------------------ requests


def test_siblings_share_a_leader_and_a_prompt() -> None:
    prepared = processor().prepare(Prompt(text="Hello"), SamplingParams(n=3), request_id="mine")
    leader, *siblings = prepared.sequences
    assert prepared.id == "mine" and "mine" not in leader.id, "a client's id is only a label"
    assert [s.index for s in prepared.sequences] == [0, 1, 2]
    assert leader.prefix_leader is None and {s.prefix_leader for s in siblings} == {leader.id}
    assert len({s.id for s in prepared.sequences}) == 3
    assert all(s.prompt_ids is leader.prompt_ids for s in siblings)
    second = processor()
    ids = {
        s.id
        for _ in range(5)
        for s in second.prepare(Prompt(text="x"), SamplingParams(n=2)).sequences
    }
    assert len(ids) == 10


def test_truncation_keeps_the_end() -> None:
    prepared = processor().prepare(
        Prompt(ids=list(range(200))), SamplingParams(truncate_prompt_tokens=5)
    )
    assert prepared.prompt_ids == [195, 196, 197, 198, 199]
    with pytest.raises(ContextLengthError, match="200 tokens"):
        processor().prepare(Prompt(ids=list(range(200))))


def test_bad_words_with_and_without_a_space() -> None:
    prepared = processor().prepare(Prompt(text="x"), SamplingParams(bad_words=["world", " the"]))

    def encoded(text: str) -> list[int]:
        return TOKENIZER.encode(text, add_special_tokens=False)

    assert prepared.sequences[0].bad_words == [encoded("world"), encoded(" world"), encoded(" the")]


def test_defaults_serve_requests_without_parameters() -> None:
    defaults = SamplingParams(temperature=0.3, max_tokens=7)
    with_defaults = processor(defaults=defaults, output_limit=7)
    assert with_defaults.prepare(Prompt(text="x")).params == defaults
    assert with_defaults.prepare(Prompt(text="x"), SamplingParams()).params == SamplingParams()
    assert (
        with_defaults.prepare(Prompt(text="x"), SamplingParams(max_tokens=None)).params.max_tokens
        == 7
    )
    free = processor().prepare(Prompt(text="x"), SamplingParams(max_tokens=None))
    assert free.params.max_tokens is None, "the engine takes the rest of the context"


def test_a_priority_beside_the_parameters() -> None:
    params = SamplingParams(priority=2)
    assert processor().prepare(Prompt(text="x"), params).params.priority == 2
    assert processor().prepare(Prompt(text="x"), params, priority=-1).params.priority == -1
    with pytest.raises(RequestError, match="priority"):
        processor().prepare(Prompt(text="x"), params, priority=2**40)
    deaf = processor(priorities=False)
    assert deaf.prepare(Prompt(text="x"), SamplingParams(), priority=0).params.priority == 0
    for sampling, priority in ((params, None), (SamplingParams(), 3)):
        with pytest.raises(RequestError, match="scheduling_policy=priority") as exc_info:
            deaf.prepare(Prompt(text="x"), sampling, priority=priority)
        assert exc_info.value.param == "priority"


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        (Prompt(ids=[]), {}, "prompt"),
        (Prompt(text=""), {}, "prompt"),
        (Prompt(ids=[10**6]), {}, "prompt"),
        (Prompt(ids=[-1]), {}, "prompt"),
        (Prompt(text="x"), {"stop_token_ids": [10**6]}, "stop_token_ids"),
        (Prompt(text="x"), {"logit_bias": {10**6: 1.0}}, "logit_bias"),
        (Prompt(text="x"), {"ignore_eos": True, "max_tokens": None}, "ignore_eos"),
        (Prompt(text="x" * 64 * 512 + "x"), {}, "prompt"),
        (Prompt(text="\udc00"), {}, "prompt"),
    ],
)
def test_wrong_requests_name_their_parameter(
    prompt: Prompt, params: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as exc_info:
        processor(output_limit=5).prepare(prompt, SamplingParams(**params))
    assert exc_info.value.param == param


def test_wrong_arguments() -> None:
    with pytest.raises(RequestError, match="sampling_params is dict"):
        processor().prepare(Prompt(text="x"), {"n": 1})  # type: ignore[arg-type]
    for label in ("", "x" * 129, "a\nb"):
        with pytest.raises(RequestError) as exc_info:
            processor().prepare(Prompt(text="x"), request_id=label)
        assert exc_info.value.param == "request_id"


def test_without_a_tokenizer_ids_work_and_text_says_what_to_do() -> None:
    bare = processor(guarded_tokenizer=None, renderer=None)
    assert bare.prepare(Prompt(ids=[1, 2])).prompt_ids == [1, 2]
    for call in (
        lambda: bare.prepare(Prompt(text="x")),
        lambda: bare.prepare(Prompt(ids=[1]), SamplingParams(stop="x")),
        lambda: bare.prepare(Prompt(ids=[1]), SamplingParams(bad_words=["x"])),
        lambda: bare.render(Conversation(messages=[{"role": "user", "content": "x"}])),
    ):
        with pytest.raises(RequestError, match="prompt_token_ids"):
            call()


def test_a_conversation_is_rendered_and_encoded() -> None:
    messages = [{"role": "user", "content": "hi <|im_end|>"}]
    prompt = processor().render(Conversation(messages=messages))
    assert type(prompt.text) is str and prompt.text.endswith("<|im_start|>assistant\n")
    assert prompt.ids is not None and prompt.ids.count(2) == 1


def test_markers_of_a_plain_prompt_are_special_tokens() -> None:
    assert (
        processor().prepare(Prompt(text="<|im_start|>user\nhi<|im_end|>")).prompt_ids.count(2) == 1
    )


# ------------------------------------------------------------------ defaults of a checkpoint


def defaults(
    folder: Path, file: dict[str, Any] | None, **options: Any
) -> tuple[SamplingParams, int | None]:
    if file is not None:
        (folder / "generation_config.json").write_text(json.dumps(file))
    return default_params(from_options(options).model, folder)


def test_defaults_of_a_checkpoint(tmp_path: Path) -> None:
    file = {
        "temperature": 0.3,
        "top_k": 7,
        "max_new_tokens": 5,
        "top_p": None,
        "do_sample": True,
        "eos_token_id": [1],
    }
    params, limit = defaults(tmp_path, file)
    assert (params.temperature, params.top_k, params.max_tokens, params.top_p, limit) == (
        0.3,
        7,
        5,
        1.0,
        5,
    )
    assert defaults(tmp_path, None, generation_config="treadle") == (SamplingParams(), None)
    override = {"top_k": 9, "presence_penalty": 0.5}
    params, _ = defaults(tmp_path, None, override_generation_config=override)
    assert (params.top_k, params.presence_penalty, params.temperature) == (9, 0.5, 0.3)
    (tmp_path / "empty").mkdir()
    assert defaults(tmp_path / "empty", None) == (SamplingParams(), None)
    assert defaults(tmp_path / "empty", None, generation_config=str(tmp_path))[1] == 5


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ({"temperature": -3}, {}, "temperature is -3"),
        ({"max_new_tokens": "many"}, {}, "generation_config=treadle"),
        (None, {"override_generation_config": {"tempratur": 1}}, "'tempratur'"),
        (None, {"generation_config": "/no/such"}, "/no/such"),
    ],
)
def test_impossible_defaults(file: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        defaults(tmp_path, file, **options)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_of_defaults_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        defaults(tmp_path, None)


# ------------------------------------------------------------------ opening a checkpoint


def open_folder(folder: Path, **options: Any) -> Any:
    config = from_options(model=str(folder), **options)
    return open_checkpoint(config, PluginManager(plugin_config(config)))


def test_opening_through_the_plugins(tmp_path: Path) -> None:
    vocabularies.save(
        vocabularies.byte_level(), tmp_path, {"eos_token": "<|im_end|>"}, templates.TRAINING
    )
    (tmp_path / "config.json").write_text("{}")
    opened = open_folder(tmp_path)
    assert opened.tokenizer.eos_token_id == 2
    assert "hi" in opened.renderer.render([{"role": "user", "content": "hi"}])
    replaced = open_folder(tmp_path, chat_template="T{{ messages[0].content }}")
    assert replaced.renderer.render([{"role": "user", "content": "hi"}]) == "Thi"


def test_opening_without_or_with_another_tokenizer(tmp_path: Path) -> None:
    bare, tokenizer_folder = tmp_path / "bare", tmp_path / "other"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    (bare / "generation_config.json").write_text('{"top_k": 3}')
    opened = open_folder(bare)
    assert opened.tokenizer is None and opened.defaults.top_k == 3
    with pytest.raises(CheckpointError, match="tokenizer=<folder"):
        opened.need_tokenizer()
    vocabularies.save(vocabularies.words(), tokenizer_folder)
    opened = open_folder(bare, tokenizer=str(tokenizer_folder))
    assert opened.tokenizer.encode("hello") == [1] and opened.defaults.top_k == 3

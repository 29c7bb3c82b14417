"""Which parsers and quantization treadle's own plugins take models for, by what checkpoints say.

The templates are short forms of the families', with the words that the models were trained on.
"""

from __future__ import annotations

from typing import Any

import pytest

from treadle.api.kinds import QUANTIZATION, REASONING_PARSERS, RENDERERS, TOOL_PARSERS
from treadle.api.matching import ModelTraits
from treadle.config import from_options
from treadle.loading.matching import AUTO, decide
from treadle.plugins import PluginManager
from treadle.testing.matching import PLAIN, Matching
from treadle.text.assets import open_checkpoint, plugin_config

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}"""
HERMES = """{%- if tools %}
{{- "<|im_start|>system\\n# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}"""
QWEN3 = """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
OPENING = """{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
QWEN3_CODER = """{{- "\\n\\nIf you choose to call a function ONLY reply in the following format:\\n\\n<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>\\n</function>\\n</tool_call>" }}
{%- for tool_call in message.tool_calls %}{%- for args_name, args_value in tool_call.arguments|items %}{%- endfor %}{%- endfor %}"""
GLM = """{{- '# Tools\\n<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>\\n</tool_call>' }}
{%- set _args = tc.arguments %}{{- '/nothink' if not enable_thinking }}{{- '\\n<think></think>' }}"""
LLAMA = """{{- bos_token }}{%- if tools is not none and not tools_in_user_message %}
{{- "You have access to the following functions. To call a function, please respond with JSON for a function call." }}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- "Do not use variables.\\n\\n" }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}"""
PYTHONIC = """{{- "If you decide to invoke any of the function(s), you MUST put it in the format of " }}
{{- "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]\\n" }}
{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}"""
MISTRAL = """{{- bos_token }}{%- for message in messages %}{%- if message.role == "user" %}
{%- if tools is not none and (message == user_messages[-1]) %}{{- "[AVAILABLE_TOOLS] [" }}{{- "[/AVAILABLE_TOOLS]" }}{%- endif %}
{{- "[INST] " + message.content + "[/INST]" }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- "[TOOL_CALLS] [" }}{%- endif %}{%- endfor %}"""
R1 = """{% for message in messages %}{% if message['role'] == 'assistant' and message['tool_calls'] %}
{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json'}}{% endif %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{% endfor %}
{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""

V31 = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'}}
{{'<｜Assistant｜>'}}{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}{%- endif %}"""
KIMI = """{% for m in messages %}<|im_assistant|>assistant<|im_middle|>{% endfor %}
{{ '<|tool_calls_section_begin|><|tool_call_begin|>' + id + '<|tool_call_argument_begin|>' }}"""
HARMONY = "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}"
GRANITE = """{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}
Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'"""

THINKS = frozenset({"<think>", "</think>"})


def traits(*parts: str, tokens: frozenset[str] = frozenset(), **named: str) -> ModelTraits:
    return ModelTraits(templates={"default": "\n".join(parts), **named}, tokens=tokens)


MODELS: dict[str, tuple[ModelTraits, str | None, str | None]] = {
    "qwen 2.5": (traits(HERMES, CHATML), "hermes", None),
    "qwen 3": (traits(HERMES, CHATML, QWEN3, tokens=THINKS), "hermes", "qwen3"),
    "qwen 3 thinking": (traits(HERMES, CHATML, OPENING), "hermes", "qwen3"),
    "qwen 3 without a word of thoughts": (
        traits(HERMES, CHATML, tokens=THINKS),
        "hermes",
        "qwen3",
    ),
    "qwen 3 coder": (traits(QWEN3_CODER, CHATML), "qwen3_coder", None),
    "glm 4.5": (traits(GLM), "glm4_moe", "glm"),
    "hermes 2 pro": (traits(CHATML, tool_use=HERMES), "hermes", None),
    "hermes 3 of llama": (
        traits(HERMES, CHATML, tokens=frozenset({"<|python_tag|>"})),
        "hermes",
        None,
    ),
    "llama 3.1": (traits(LLAMA, tokens=frozenset({"<|python_tag|>"})), "llama3_json", None),
    "llama 3 without tools": (traits(CHATML, tokens=frozenset({"<|python_tag|>"})), None, None),
    "llama 4, asked for JSON": (
        traits(LLAMA, tokens=frozenset({"<|python_start|>"})),
        "llama3_json",
        None,
    ),
    "llama 4, asked for Python": (
        traits(PYTHONIC, tokens=frozenset({"<|python_start|>"})),
        "pythonic",
        None,
    ),
    "llama 3.2, asked for Python": (traits(PYTHONIC), "pythonic", None),
    "mistral v3": (traits(MISTRAL), "mistral", None),
    "mistral tekken": (ModelTraits(tokens=frozenset({"[TOOL_CALLS]", "[INST]"})), "mistral", None),
    "deepseek r1": (traits(R1, tokens=THINKS), "deepseek_v3", "deepseek_r1"),
    "qwq": (traits(HERMES, CHATML, OPENING), "hermes", "qwen3"),
    "deepseek v3.1": (traits(V31, tokens=THINKS), "deepseek_v31", "deepseek_v3"),
    "kimi k2": (traits(KIMI), "kimi_k2", None),
    "kimi k2 thinking": (traits(KIMI, OPENING), "kimi_k2", "kimi"),
    "gpt-oss": (traits(HARMONY), "harmony", "harmony"),
    "granite 3.2": (traits(GRANITE), "granite", "granite"),
    "granite 20b": (traits("{{ '<function_call> ' + call }}"), "granite-20b-fc", None),
    "internlm 2.5": (traits(CHATML, tokens=frozenset({"<|plugin|>"})), "internlm", None),
    "jamba": (traits("{{ '<tool_calls>[\\n' }}{{ '</tool_calls>' }}"), "jamba", None),
    "phi 4 mini": (traits("{{ '<|tool|>' + tools + '<|/tool|>' }}"), "phi4_mini_json", None),
    "xlam 2": (traits("{{ 'You are developed by Salesforce xLAM team.' }}"), "xlam", None),
    "minimax m2": (traits("{{ '<minimax:tool_call>' }}"), "minimax_m2", None),
    "magistral": (traits(MISTRAL, "{{ '[THINK]' }}{{ '[/THINK]' }}"), "mistral", "mistral"),
    "hunyuan a13b": (traits("{{ '<think>' }}{{ '</think>' }}{{ '<answer>' }}"), None, "hunyuan"),
    "step 3": (ModelTraits(config={"model_type": "step3_vl"}, tokens=THINKS), None, "step3"),
    "gemma 4": (traits("{{ '<|turn>model\\n<|channel>thought\\n<channel|>' }}"), None, "gemma4"),
    **{f"plain {i}": (model, None, None) for i, model in enumerate(PLAIN)},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_parsers_of_a_model(name: str) -> None:
    model, tools, thoughts = MODELS[name]
    plugins = PluginManager()
    assert decide(plugins, TOOL_PARSERS, model, AUTO).key == tools
    assert decide(plugins, REASONING_PARSERS, model, AUTO).key == thoughts
    assert decide(plugins, RENDERERS, model, AUTO).key == "jinja"


def test_the_demo_model_as_it_is_opened() -> None:
    config = from_options(model="demo:treadle-demo")
    plugins = PluginManager(plugin_config(config))
    model = open_checkpoint(config, plugins).traits
    assert model.config["architectures"] == ["LlamaForCausalLM"]
    assert "<|im_start|>" in model.tokens
    assert decide(plugins, TOOL_PARSERS, model, AUTO).key == "hermes"
    assert decide(plugins, REASONING_PARSERS, model, AUTO).key == "qwen3"


def test_a_template_of_the_users_own_decides() -> None:
    config = from_options(model="demo:treadle-demo", chat_template=MISTRAL)
    plugins = PluginManager(plugin_config(config))
    model = open_checkpoint(config, plugins).traits
    assert model.templates == {"default": MISTRAL}
    assert decide(plugins, TOOL_PARSERS, model, AUTO).key == "mistral"


@pytest.mark.parametrize(
    ("checkpoint", "method"),
    [
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "gemm"}, "awq"),
        ({"bits": 4, "group_size": 128, "desc_act": False, "damp_percent": 0.01}, "gptq"),
        ({"bits": 4}, None),
    ],
)
def test_a_quantization_that_is_not_named(checkpoint: dict[str, Any], method: str | None) -> None:
    model = ModelTraits(config={"quantization_config": checkpoint})
    assert decide(PluginManager(), QUANTIZATION, model, AUTO).key == method


class TestHermes(Matching):
    plugin = "tool_parsers:hermes"
    matched = [traits(HERMES, CHATML)]
    unmatched = [traits(QWEN3_CODER), traits(GLM), traits(LLAMA), traits(MISTRAL), traits(R1)]


class TestLlama3Json(Matching):
    plugin = "tool_parsers:llama3_json"
    matched = [traits(LLAMA)]
    unmatched = [traits(HERMES), traits(PYTHONIC), traits(MISTRAL)]


class TestMistral(Matching):
    plugin = "tool_parsers:mistral"
    matched = [traits(MISTRAL), ModelTraits(tokens=frozenset({"[TOOL_CALLS]"}))]
    unmatched = [traits(HERMES), traits(LLAMA)]


class TestPythonic(Matching):
    plugin = "tool_parsers:pythonic"
    matched = [traits(PYTHONIC), ModelTraits(tokens=frozenset({"<|python_start|>"}))]
    unmatched = [traits(HERMES), traits(LLAMA), traits(MISTRAL), traits(QWEN3_CODER)]


class TestDeepSeekR1(Matching):
    plugin = "reasoning_parsers:deepseek_r1"
    matched = [traits(R1)]
    unmatched = [traits(QWEN3), traits(OPENING), ModelTraits(tokens=THINKS)]


class TestQwen3(Matching):
    plugin = "reasoning_parsers:qwen3"
    matched = [traits(QWEN3), traits(OPENING), ModelTraits(tokens=THINKS)]
    unmatched = [traits(HERMES), ModelTraits(tokens=frozenset({"<think>"}))]

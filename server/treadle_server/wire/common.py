"""Fields that several endpoints share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

__all__ = (
    "CompletionTokensDetails",
    "JSONSchema",
    "PromptTokensDetails",
    "ResponseFormat",
    "SamplingFields",
    "StreamOptions",
    "StructuredOutputs",
    "Usage",
    "WireLogprob",
)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JSONSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """``format``, or the older ``structures`` and ``triggers``, belong to a structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An unknown field is an error here: it would be a constraint that is not enforced."""

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None
    strict: bool | None = None
    backend: str | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """How to sample: the OpenAI parameters and those of vLLM under their names."""

    model: Annotated[
        str | None, Meta(description="A name that the server serves; the first one if left out.")
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer with server-sent events.")] = None
    stream_options: Annotated[
        StreamOptions | None, Meta(description="What a stream tells beside the output.")
    ] = None
    user: Annotated[str | None, Meta(description="Accepted and not used.")] = None
    n: Annotated[int | None, Meta(description="Number of outputs for each prompt.")] = None
    best_of: Annotated[
        int | None,
        Meta(
            description="Number of outputs of which a completion answers with the n most probable."
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Meta(description="Most tokens of an output; -1 is as many as the context has room for."),
    ] = None
    min_tokens: Annotated[int | None, Meta(description="Tokens before which no output ends.")] = (
        None
    )
    temperature: Annotated[
        float | None,
        Meta(description="0 takes the most probable token, higher values spread the choice."),
    ] = None
    top_p: Annotated[
        float | None,
        Meta(description="Keep the most probable tokens whose probabilities sum to this."),
    ] = None
    top_k: Annotated[
        int | None,
        Meta(description="Keep this many of the most probable tokens; 0 or -1 keeps all."),
    ] = None
    min_p: Annotated[
        float | None,
        Meta(description="Keep tokens at least this probable, relative to the most probable one."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Meta(description="Above 1, tokens of the prompt and the output become less probable."),
    ] = None
    presence_penalty: Annotated[
        float | None, Meta(description="Subtracted from the logits of tokens that the output has.")
    ] = None
    frequency_penalty: Annotated[
        float | None, Meta(description="Subtracted once for each time that the output has a token.")
    ] = None
    seed: Annotated[int | None, Meta(description="The same seed gives the same tokens.")] = None
    stop: Annotated[
        str | list[str | None] | None, Meta(description="Texts that end an output.")
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, Meta(description="Token ids that end an output.")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Meta(description="Keep the stop text in the output.")
    ] = None
    ignore_eos: Annotated[
        bool | None, Meta(description="Go on after the end-of-sequence token; needs max_tokens.")
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        Meta(description="Added to the logits of token ids, from -100 to 100."),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, Meta(description="The only token ids that an output may have.")
    ] = None
    bad_words: Annotated[
        list[str] | None, Meta(description="Texts that an output must not have.")
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Meta(description="Log probabilities of this many alternatives for each prompt token."),
    ] = None
    skip_special_tokens: Annotated[
        bool | None, Meta(description="Leave special tokens out of the text.")
    ] = None
    spaces_between_special_tokens: Annotated[
        bool | None, Meta(description="Put spaces between special tokens.")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="Keep this many of the prompt's last tokens.")
    ] = None
    priority: Annotated[
        int | None, Meta(description="Lower is served first, if the scheduling policy is priority.")
    ] = None
    thinking_token_budget: Annotated[
        int | None, Meta(description="Tokens after which the reasoning of a chat is ended.")
    ] = None
    cache_salt: Annotated[
        str | None, Meta(description="Share the prefix cache only with requests of the same salt.")
    ] = None
    return_token_ids: Annotated[
        bool | None, Meta(description="Add token_ids and prompt_token_ids to the answer.")
    ] = None
    request_id: Annotated[
        str | None, Meta(description="Accepted and not used; send the header x-request-id.")
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
        Meta(description="What the output must match, in the form of the OpenAI API."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(
            description="What the output must match: one of json, json_object, regex, choice, grammar, "
            "structural_tag."
        ),
    ] = None
    guided_json: Annotated[
        str | dict[str, Any] | None, Meta(description="Older name of structured_outputs.json.")
    ] = None
    guided_regex: Annotated[
        str | None, Meta(description="Older name of structured_outputs.regex.")
    ] = None
    guided_choice: Annotated[
        list[str] | None, Meta(description="Older name of structured_outputs.choice.")
    ] = None
    guided_grammar: Annotated[
        str | None, Meta(description="Older name of structured_outputs.grammar.")
    ] = None
    guided_whitespace_pattern: Annotated[
        str | None, Meta(description="Older name of structured_outputs.whitespace_pattern.")
    ] = None
    guided_decoding_backend: Annotated[
        str | None, Meta(description="The plugin that compiles the constraint.")
    ] = None
    json_schema: Annotated[
        str | dict[str, Any] | None, Meta(description="SGLang's name of structured_outputs.json.")
    ] = None
    regex: Annotated[str | None, Meta(description="SGLang's name of structured_outputs.regex.")] = (
        None
    )
    ebnf: Annotated[
        str | None, Meta(description="SGLang's name of structured_outputs.grammar.")
    ] = None
    extra_args: Annotated[
        dict[str, dict[str, Any]] | None,
        Meta(description="Arguments of logits processors and of the scheduling policy, by name."),
    ] = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class WireLogprob(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One alternative in ``prompt_logprobs``."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None

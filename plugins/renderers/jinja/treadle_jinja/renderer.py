"""The ``jinja`` chat renderer: messages to prompt text, prompt text to ids."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.api.checkpoints import template_text
from treadle.errors import CheckpointError, ConfigError, RequestError
from treadle_jinja.isolation import TemplateProcesses
from treadle_jinja.marker_escaping import MarkerEscaper, Markers, RenderedPrompt
from treadle_jinja.plain_json import plain_json
from treadle_jinja.template import ChatTemplate, Renders

if TYPE_CHECKING:
    from treadle.api.files import Tokenizer

__all__ = ("JinjaRenderer", "open_renderer")

HARMONY = "<|channel|>analysis<|message|>"
"""What the templates of gpt-oss write before a thought."""
REASONING = ("reasoning_content", "thinking", "reasoning")
PROBE = "treadleprobe"
PARTS = [{"type": "text", "text": PROBE}]
RESERVED = ("messages", "tools", "add_generation_prompt")


class JinjaRenderer:
    """Renders with the checkpoint's chat template, as transformers does.

    Immutable after construction and safe in threads. ``encode`` turns markers into special tokens
    where the template wrote them, not where a message did; that knowledge is in the ``str``
    subclass that ``render`` returns and is lost when the text is edited.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        templates: Mapping[str, str] | None = None,
        variables: Mapping[str, str] | None = None,
        markers: Mapping[str, int] | None = None,
        isolated: Renders | None = None,
    ) -> None:
        """``variables`` (``bos_token`` …) are visible to templates; ``markers`` are the texts that
        encoding turns into one token each; ``isolated`` runs the templates outside of this
        process. Raises ``CheckpointError`` for a broken template."""
        self._tokenizer = tokenizer
        self._isolated = isolated
        self._variables = dict(variables or {})
        self._templates = {
            name: ChatTemplate(text, f"{name} chat template", isolated)
            for name, text in (templates or {}).items()
        }
        special = {tokenizer.id_to_token(token) for token in tokenizer.special_token_ids}
        template_markers = [
            m for m in markers or () if any(m in t.literals for t in self._templates.values())
        ]
        # An assistant's turn was written by a model, which may use the template's plain tokens
        # (<think>, <tool_call>); what is truly special nobody but the template may write.
        self._special = Markers(special)
        self._markers = Markers(special.union(template_markers))
        self._used_variables: dict[tuple[str, bool], bool] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other: one opens a "
                "new turn, the other leaves the last one open",
                param="continue_final_message",
            )
        template = self._choose(tools)
        plain_messages = [_message(i, message) for i, message in enumerate(messages)]
        if not plain_messages:
            raise RequestError("messages is empty; send at least one message", param="messages")
        arguments = plain_json(dict(template_arguments or {}), "chat_template_kwargs")
        if conflicts := [name for name in RESERVED if name in arguments]:
            raise RequestError(
                f"chat_template_kwargs holds {conflicts[0]!r}, which has its own parameter",
                param="chat_template_kwargs",
            )
        plain_messages = [self._adapt_messages(template, message) for message in plain_messages]
        schemas = None if tools is None else plain_json(list(tools), "tools")
        escaper = MarkerEscaper(plain_messages, schemas, arguments)
        escaped = [self._escape_message(escaper, message) for message in plain_messages]
        last = _mark_tail(escaped, escaper.tail) if continue_final_message else ""
        text = template.render(
            {
                **self._variables,
                **escaper.escape(arguments, self._markers),
                "messages": escaped,
                "tools": escaper.escape(schemas, self._markers),
                "documents": escaper.escape(arguments.get("documents"), self._markers),
                "add_generation_prompt": add_generation_prompt,
            }
        )
        if continue_final_message:
            text = _cut_tail(text, escaper.tail, last)
        return RenderedPrompt.of(text, escaper.mark)

    def encode(self, prompt: str) -> list[int]:
        """Encode a rendered prompt. Markers in a plain ``str`` all count as the template's own."""
        encode = self._tokenizer.encode
        if not isinstance(prompt, RenderedPrompt) or not prompt.escape_positions:
            return encode(prompt, add_special_tokens=False)
        first, *rest = prompt.parts()
        ids = encode(first, add_special_tokens=False)
        newline = encode("\n", add_special_tokens=False)
        for part in rest:
            # SentencePiece puts a space before a text; behind a newline it has no reason to.
            suffix_ids = encode("\n" + part, add_special_tokens=False)
            is_aligned = suffix_ids[: len(newline)] == newline
            ids += (
                suffix_ids[len(newline) :] if is_aligned else encode(part, add_special_tokens=False)
            )
        return ids

    def start(self) -> None:
        """Start the process of isolated templates before the first chat, if that is possible."""
        if self._isolated is not None:
            with contextlib.suppress(OSError):
                self._isolated.start()

    def close(self) -> None:
        """Release the processes of isolated templates. May be called twice."""
        if self._isolated is not None:
            self._isolated.close()

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        names = ", ".join(sorted(self._templates))
        available = f"it has {names} but none named default" if names else "it has none"
        raise RequestError(
            f"this model cannot chat: {available}. Start the engine with chat_template (a file or the "
            "text of a Jinja template), or send a prompt instead of messages",
            param="messages",
        )

    def _escape_message(self, escaper: MarkerEscaper, message: Mapping[str, Any]) -> dict[str, Any]:
        markers = self._special if message["role"] == "assistant" else self._markers
        escaped = escaper.escape(message, markers)
        escaped["role"] = escaper.escape(message["role"], self._markers)
        return dict(escaped)

    # -- text or a list of parts -----------------------------------------------------

    def _adapt_messages(self, template: ChatTemplate, message: dict[str, Any]) -> dict[str, Any]:
        """Give ``content`` the form that the template reads: most know text only, some only parts."""
        content, thought = message.get("content"), message.get("thinking")
        if thought and content and message.get("tool_calls") and HARMONY in template.literals:
            # These templates refuse both, though the model writes a message for each.
            parts = _texts(content) if isinstance(content, list) else [str(content)]
            return {**message, "thinking": "\n".join([str(thought), *parts]), "content": ""}
        if isinstance(content, list):
            if not self._template_variables(template, PARTS):
                return {**message, "content": "\n".join(_texts(content))}
        elif (
            isinstance(content, str)
            and not self._template_variables(template, PROBE)
            and self._template_variables(template, PARTS)
        ):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _template_variables(self, template: ChatTemplate, content: Any) -> bool:
        """Whether the template writes the text of ``content`` and nothing of its structure."""
        key = (template.source, isinstance(content, str))
        if key not in self._used_variables:
            self._used_variables[key] = self._probe(template, content)
        return self._used_variables[key]

    def _probe(self, template: ChatTemplate, content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            text = template.render(
                {
                    **self._variables,
                    "messages": messages,
                    "tools": None,
                    "add_generation_prompt": True,
                }
            )
        except RequestError:
            return False
        return PROBE in text and not any(f"{q}text{q}" in text for q in "'\"")


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A plain copy without the keys that say nothing, as transformers passes it to a template."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] is {type(message).__name__}; each message is an object with a role "
            "and a content",
            param=f"messages[{index}]",
        )
    fields: dict[str, Any] = plain_json({k: v for k, v in message.items() if v is not None})
    if not isinstance(fields.get("role"), str) or not fields["role"]:
        raise RequestError(
            f"messages[{index}] has the role {fields.get('role')!r}; it must be a text such as user, "
            "assistant or system",
            param=f"messages[{index}].role",
        )
    reasoning = next((fields[name] for name in REASONING if name in fields), None)
    if reasoning is not None:
        fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
    return fields


def _texts(parts: Sequence[Any]) -> list[str]:
    texts: list[str] = []
    for part in parts:
        text = (
            part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        )
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"a message has a part of type {kind!r}; this model's template takes text only",
                param="messages",
            )
        texts.append(text)
    return texts


def _mark_tail(messages: list[dict[str, Any]], tail: str) -> str:
    """Mark the end of the last message's text, where the prompt will be cut; return that text."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = f"{content}{tail} "
        return content
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = f"{text}{tail} "
                return text
    raise RequestError(
        "continue_final_message needs a last message with text in its content", param="messages"
    )


def _cut_tail(text: str, tail: str, last: str) -> str:
    """Drop what the template wrote after the last message; if it trims messages, so do we."""
    pos = text.rfind(tail)
    if pos < 0 or last.strip() not in text:
        raise RequestError(
            "continue_final_message is set, but the chat template changes or drops the last message",
            param="continue_final_message",
        )
    return text[:pos] if text.startswith(" ", pos + 1) else text[:pos].rstrip()


def open_renderer(
    tokenizer: Tokenizer, override: str | None = None, *, isolated: bool = False
) -> JinjaRenderer:
    """The renderer of a tokenizer; ``override`` replaces all templates of the checkpoint, and
    ``isolated`` runs them in a process of their own."""
    templates: Mapping[str, str] = getattr(tokenizer, "chat_templates", {})
    if not templates and tokenizer.chat_template is not None:
        templates = {"default": tokenizer.chat_template}
    text = template_text(override)
    try:
        return JinjaRenderer(
            tokenizer,
            templates=templates if text is None else {"default": text},
            variables=getattr(tokenizer, "special_tokens", {}),
            markers=getattr(tokenizer, "added_tokens", {}),
            isolated=TemplateProcesses() if isolated else None,
        )
    except CheckpointError as error:
        if text is None:
            raise
        raise ConfigError(f"option chat_template: {error}") from error

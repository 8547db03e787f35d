"""Renders the Jinja chat templates of model folders, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, Final, NoReturn

import jinja2
import jinja2.nodes
import jinja2.parser
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace_common.errors import ConfigError, InvalidRequest
from headrace_text.codec import ChatMessage

_FIELD = "chat.messages"
# Marks the end of the final message: text that the template adds after it is cut off. The space after the mark shows
# whether the template trimmed the message.
_END_MARK = "\u2060headrace-end-of-message\u2060 "
_MARK: Final = "headrace-text"
_SYSTEM: Final = ("system", "developer")
_TEMPLATE_ERRORS = (
    *(jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError),
    *(AttributeError, RecursionError),
)


class _GenerationBlock(Extension):
    """Replaces a {% generation %} block by its content. Only training uses these blocks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Gives a template a plain dictionary of globals: Jinja's ChainMap takes longer than the rest of most templates."""

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        return {**self.globals, **(d or {})}


class _Contents(Enum):
    """The contents of messages that a template of a model with images takes."""

    TEXTS = "texts"
    """Texts, with placeholders for images in them."""
    BOTH = "both"
    """Texts, and lists of parts."""
    LISTS = "lists"
    """Lists of parts."""


class ChatTemplate:
    """One compiled template. `special_tokens` maps the names that it may use, such as bos_token, to their text.

    `image_text` is the placeholder for an image, empty for a model without images.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], image_text: str = ""
    ) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"the model's chat template cannot be compiled: {error}; repair it in the model folder",
                metadata={"cause": str(error)},
            ) from error
        self._image_text = image_text
        self._contents = _Contents.BOTH
        self._takes_objects = True
        if image_text:
            self._contents = self._find_contents()
        self._takes_objects = bool(self._try_call() or not self._try_call(as_text=True))

    def render(
        self,
        values: Mapping[str, Any],
        *,
        continue_final_message: bool,
        add_generation_prompt: bool = True,
    ) -> str:
        """The conversation as text. `values` are as of `template_values`.

        Raises InvalidRequest with the template's own error message.
        """
        if not continue_final_message:
            return self._render(values, add_generation_prompt=add_generation_prompt)
        *others, final = values["messages"]
        marked = {**final, "content": final["content"] + _END_MARK}
        rendered = self._render(
            {**values, "messages": [*others, marked]}, add_generation_prompt=False
        )
        return _cut_at_mark(rendered, final["content"])

    def _render(self, values: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        if self._contents is not _Contents.BOTH:
            messages = [
                {**message, "content": self._content_for_template(message["content"])}
                for message in values["messages"]
            ]
            values = {**values, "messages": messages}
        if not self._takes_objects:
            messages = [_with_arguments_as_text(message) for message in values["messages"]]
            values = {**values, "messages": messages}
        variables = {
            "documents": None,
            **values,
            **self._special_tokens,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                {_FIELD: f"the chat template rejects them: {str(error) or type(error).__name__}"}
            ) from error

    def _content_for_template(self, content: str | list[dict[str, str]]) -> Any:
        if isinstance(content, str):
            is_text = self._contents is _Contents.TEXTS
            return content if is_text else [{"type": "text", "text": content}]
        if self._contents is _Contents.LISTS:
            return content
        # As in vLLM, images stand before the text.
        texts = [part["text"] for part in content if part["type"] == "text"]
        return "\n".join([self._image_text] * (len(content) - len(texts)) + texts)

    def _find_contents(self) -> _Contents:
        """Tries contents of both kinds."""
        with_image = self._try([{"type": "image"}, {"type": "text", "text": _MARK}])
        if with_image.count(self._image_text) != 1 or _MARK not in with_image:
            return _Contents.TEXTS
        return _Contents.BOTH if _MARK in self._try(_MARK) else _Contents.LISTS

    def _try_call(self, *, as_text: bool = False) -> str:
        """A conversation with a call. Some templates take its arguments as a JSON text only."""
        function = {"name": "f", "arguments": {"x": _MARK}}
        # Mistral's templates want ids of nine letters and digits.
        call = {"id": "headrace1", "type": "function", "function": function}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._try(_MARK, _with_arguments_as_text(message) if as_text else message)

    def _try(self, content: Any, *others: Mapping[str, Any]) -> str:
        values = {"messages": [{"role": "user", "content": content}, *others], "tools": None}
        try:
            return self._render(values, add_generation_prompt=True)
        except InvalidRequest:
            return ""


def with_system_first(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages for a template that takes a system message at the start only.

    A later one is a part of the message before it, or of the user's after it. So the start is the same in each turn.
    """
    merged = list(messages[:1])
    waits = False
    """Whether the last message may be the beginning of the user's."""
    for message in messages[1:]:
        last, is_late = merged[-1], message.role in _SYSTEM
        joins = last.role in (*_SYSTEM, "user") if is_late else waits and message.role == "user"
        if joins and not (last.parts or message.parts):
            merged[-1] = last._replace(content=f"{last.content}\n\n{message.content}")
            waits = waits and is_late
        else:
            merged.append(message._replace(role="user") if is_late else message)
            waits = is_late
    return merged


def template_values(
    messages: Sequence[ChatMessage],
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The variables of a chat template: JSON values, in the form that templates of Hugging Face's format expect."""
    return {
        **(template_kwargs or {}),
        "messages": [_message_object(message) for message in messages],
        "tools": list(tools) or None,
    }


def _message_object(message: ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.parts:
        found["content"] = [
            {"type": "image"} if part is None else {"type": "text", "text": part}
            for part in message.parts
        ]
    if message.name:
        found["name"] = message.name
    if message.reasoning:
        # Templates have either name.
        found["reasoning"] = found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    return found


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**function, "arguments": _to_json(function["arguments"])}}
        for call in message["tool_calls"]
        for function in (call["function"],)
    ]
    return {**message, "tool_calls": calls}


def _cut_at_mark(rendered: str, final_content: str) -> str:
    mark = _END_MARK.strip()
    end = rendered.rfind(mark)
    if end < 0 or final_content.strip() not in rendered:
        raise InvalidRequest(
            {_FIELD: "the chat template drops part of the final message: it cannot be continued"}
        )
    if rendered.startswith(_END_MARK, end):
        return rendered[:end]
    return rendered[:end].rstrip()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML. No model was trained on that.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)

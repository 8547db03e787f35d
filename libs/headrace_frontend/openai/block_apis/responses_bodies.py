"""The bodies of /v1/responses, as OpenAI has them, and the chats that they ask for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, model_validator

from headrace_common.limits import CHAT_MESSAGES_MAX, CHAT_TOOLS_MAX
from headrace_frontend.openai.body import ForwardingBody, LenientBody
from headrace_frontend.openai.messages import MessageBody

_PARTS_MAX: Final = 1_024
# The input of a custom tool, as the model writes it.
_CUSTOM: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
_IMAGE: Final = "input_image"
# Other values of `include` name what a response has anyway, or what runs at OpenAI.
_LOGPROBS: Final = "message.output_text.logprobs"
_PARTS: Final = (
    *("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"),
    _IMAGE,
)
_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning")
REFERENCE: Final = "item_reference"
_ARGUMENTS: Final = ("arguments", "input", "action")
_UNSUPPORTED: Final = "is not supported; send what it has as instructions and input"


class PartBody(LenientBody):
    """A part of an item's content. Of a type that says nothing here, it has the type alone."""

    type: str
    text: str = ""
    refusal: str = ""
    image_url: str = ""

    older = frozenset({"type"})

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        kind = fields.get("type")
        if kind == "input_file":
            name = fields.get("filename", "file")
            return {"type": "text", "text": f"[{name}: not readable here]"}
        known = not isinstance(kind, str) or kind in _PARTS
        return fields if known else {"type": kind}

    @property
    def ignored(self) -> Iterable[str]:
        return () if self.type in _PARTS else (self.type,)

    @model_validator(mode="after")
    def _check(self) -> PartBody:
        if self.is_image and not self.image_url:
            raise ValueError("image_url: is missing; send a data: URL")
        return self

    @property
    def is_image(self) -> bool:
        """Whether it is an image, and else text."""
        return self.type == _IMAGE


_Parts = Annotated[list[PartBody], Field(fail_fast=True, max_length=_PARTS_MAX)]


class ItemBody(LenientBody):
    """An item of the conversation: a message, a call of a function, what it returned, or reasoning.

    Other calls become calls of functions. Another item, such as what ran at OpenAI, has its type alone.
    """

    type: str = "message"
    id: Any = ""
    """Of a reference a text. Those of other items are ignored."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | _Parts | None = None
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    arguments: str = ""
    output: str | _Parts = ""
    summary: _Parts | None = None

    older = frozenset({"type"})

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        kind = fields.get("type", "message")
        if not isinstance(kind, str) or kind in _ITEMS:
            return fields
        if kind == REFERENCE:
            return {"type": kind, "id": fields.get("id")}
        if not isinstance(call_id := fields.get("call_id"), str):
            return {"type": kind}
        if kind.endswith("_output"):
            output = fields.get("output", "")
            is_text = isinstance(output, str) or _are_parts(output)
            output = output if is_text else json.dumps(output, ensure_ascii=False)
            return {"type": "function_call_output", "call_id": call_id, "output": output}
        given: Any = next((fields[name] for name in _ARGUMENTS if name in fields), {})
        given = {"input": given} if isinstance(given, str) else given
        return {
            "type": "function_call",
            "call_id": call_id,
            "name": fields.get("name", kind.removesuffix("_call")),
            "arguments": json.dumps(given, ensure_ascii=False),
        }

    @property
    def ignored(self) -> Iterable[str]:
        return () if self.type in _ITEMS or self.is_reference else (self.type,)

    @property
    def is_reference(self) -> bool:
        """Whether it stands for a stored item, by its id."""
        return self.type == REFERENCE

    @model_validator(mode="after")
    def _check(self) -> ItemBody:
        if self.is_reference and not (self.id and isinstance(self.id, str)):
            raise ValueError("id: is missing; send that of a stored item, or the item itself")
        if self.type == "message" and self.role is None:
            raise ValueError("role: a message needs a role")
        if self.role != "user" and _has_image(self.content):
            raise ValueError("content: only messages of role user have images; leave them out")
        return self


def _are_parts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) and "type" in one for one in value)


class ResponsesTool(LenientBody):
    """A tool, or a namespace of tools. Only functions and custom tools can be called here. Others are left out."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=CHAT_TOOLS_MAX)] | None = None


class ResponsesToolChoice(LenientBody):
    """The choice of one function, or of some tools."""

    type: str
    name: str = ""
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class TextFormat(LenientBody):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool = False


class TextBody(LenientBody):
    """What the text of an answer is like."""

    format: TextFormat | None = None


class ReasoningBody(LenientBody):
    """How much the model reasons."""

    effort: str | None = None


class ConversationReference(LenientBody):
    """A stored conversation."""

    id: str


class ResponsesBody(ForwardingBody):
    """A request of /v1/responses."""

    # They say nothing to the model.
    without_effect = frozenset(
        {
            *("client_metadata", "max_tool_calls", "safety_identifier"),
            *("service_tier", "stream_options", "truncation", "user"),
        }
    )

    model: str = ""
    input: (
        str
        | Annotated[
            list[ItemBody], Field(fail_fast=True, min_length=1, max_length=CHAT_MESSAGES_MAX)
        ]
    )
    include: list[str] | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningBody | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: float | None = None
    text: TextBody | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    tools: (
        Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=CHAT_TOOLS_MAX)] | None
    ) = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**32)] = 0
    top_p: float | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: str | ConversationReference | None = None
    # It needs state of another kind.
    prompt: Any = None
    sent_input: Any = None
    """The input as it was sent."""

    older = frozenset({"input"})

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "sent_input": fields.get("input")}

    @model_validator(mode="after")
    def _check(self) -> ResponsesBody:
        if self.prompt:
            raise ValueError(f"prompt: {_UNSUPPORTED}")
        if self.background and self.store is False:
            raise ValueError("background: needs the response to be stored; leave store out")
        if self.conversation_id and self.previous_response_id:
            raise ValueError("conversation: excludes previous_response_id; send one of them")
        return self

    @property
    def request_id(self) -> str:
        """The id that the client gives. Empty for none."""
        return str(self.forwarded.get("request_id") or "")

    @property
    def conversation_id(self) -> str:
        """The conversation that it continues. Empty for none."""
        given = self.conversation or ""
        return given if isinstance(given, str) else given.id

    @property
    def references(self) -> list[str]:
        """The ids of stored items in its input."""
        items = [] if isinstance(self.input, str) else self.input
        return list(dict.fromkeys(item.id for item in items if item.is_reference))

    @property
    def needs_stored_items(self) -> bool:
        """Whether items that it does not have belong to its input."""
        return bool(self.conversation_id or self.references)

    def use_input(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Takes these items in place of its input."""
        self.input = [ItemBody.model_validate(item) for item in items]
        self.sent_input = None

    @property
    def chat(self) -> dict[str, Any]:
        """The body of the same chat for /v1/chat/completions, without the instructions."""
        tools = [_tool(namespace, tool) for namespace, tool in self._functions]
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": self.stream is True or self.background is True,
            "messages": _messages(self.input),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "prompt_cache_key": self.prompt_cache_key,
            "tools": tools or None,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": _response_format(
                self.text.format if self.text is not None else None
            ),
        }
        if _LOGPROBS in (self.include or ()):
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if tools:
            fields["tool_choice"] = _tool_choice(self.tool_choice)
            fields["parallel_tool_calls"] = self.parallel_tool_calls
        sent = {name: value for name, value in fields.items() if value is not None}
        return self.forwarded | sent

    @property
    def namespaced(self) -> Mapping[str, tuple[str, str]]:
        """Namespace and name of each function in a namespace, by the name that the model sees."""
        found = ((namespace, tool.name) for namespace, tool in self._functions if namespace)
        return {_seen_name(*names): names for names in found}

    @property
    def customs(self) -> frozenset[str]:
        """The names of tools with an input that is a text, and no JSON."""
        return frozenset(tool.name for tool in self.tools or () if tool.type == "custom")

    @property
    def _functions(self) -> Iterator[tuple[str, ResponsesTool]]:
        """The functions that can be called, each with its namespace, which may be empty."""
        for tool in self.tools or ():
            if tool.type in ("function", "custom"):
                yield "", tool
            elif tool.type == "namespace":
                yield from ((tool.name, one) for one in tool.tools or () if one.type == "function")

    @property
    def echoed(self) -> dict[str, Any]:
        """The fields that a response repeats."""
        return {
            "background": self.background is True,
            "conversation": {"id": self.conversation_id} if self.conversation_id else None,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning and self.reasoning.effort, "summary": None},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": _plain(self.text and self.text.format) or {"type": "text"}},
            "tool_choice": _plain(self.tool_choice) or "auto",
            "tools": [_plain(tool) for tool in self.tools or ()],
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True, exclude_unset=True)
    return value


def messages_of_output(items: Iterable[Mapping[str, Any]]) -> list[MessageBody]:
    """The messages of a response's output, as when a client sends it back."""
    messages = _messages(map(ItemBody.model_validate, items))
    return [MessageBody.model_validate(message) for message in messages]


def _messages(items: str | Iterable[ItemBody]) -> list[dict[str, Any]]:
    """The messages of a chat."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        _add(item, messages)
    return messages


def _add(item: ItemBody, messages: list[dict[str, Any]]) -> None:
    if item.type == "function_call_output":
        message = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
        messages.append(message)
        if _has_image(item.output):
            # Only users send images.
            messages.append({"role": "user", "content": _parts(item.output, images_only=True)})
        return
    if item.type not in _ITEMS:
        return
    if item.type == "message" and item.role != "assistant":
        role = "user" if item.role == "user" else "system"
        begun = messages[-1] if messages else {}
        if role == begun.get("role") == "system" and len(messages) == 1:
            begun["content"] += "\n\n" + _text(item.content)
        else:
            content = _parts(item.content) if _has_image(item.content) else _text(item.content)
            messages.append({"role": role, "content": content})
        return
    # Text, reasoning and calls that follow each other are one turn of the model.
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if turn is None:
        turn = {"role": "assistant", "content": ""}
        messages.append(turn)
    if item.type == "function_call":
        name = _seen_name(item.namespace, item.name)
        function = {"name": name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    elif item.type == "reasoning":
        thoughts = _text(item.content) or _text(item.summary)
        turn["reasoning"] = "\n".join(filter(None, (turn.get("reasoning"), thoughts)))
    else:
        turn["content"] = "\n".join(filter(None, (turn["content"], _text(item.content))))


def _has_image(content: str | list[PartBody] | None) -> bool:
    """Whether the content of an item has an image."""
    return isinstance(content, list) and any(part.is_image for part in content)


def _parts(
    content: str | list[PartBody] | None, *, images_only: bool = False
) -> list[dict[str, Any]]:
    """The content of a message with images."""
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if part.is_image
        else {"type": "text", "text": part.text or part.refusal}
        for part in (content if isinstance(content, list) else ())
        if part.is_image or not images_only
    ]


def _text(content: str | list[PartBody] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal for part in content if not part.is_image)


def _seen_name(namespace: str, name: str) -> str:
    """The name of a function for the model. Chat templates have no namespaces."""
    return f"{namespace}__{name}" if namespace else name


def _tool(namespace: str, tool: ResponsesTool) -> dict[str, Any]:
    definition = (tool.format or {}).get("definition")
    about = (tool.description, definition and f"The input follows this grammar:\n{definition}")
    function = {
        "name": _seen_name(namespace, tool.name),
        "description": "\n\n".join(filter(None, about)) or None,
        "parameters": _CUSTOM if tool.type == "custom" else tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: str | ResponsesToolChoice | None) -> Any:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.name}}
    return _plain(choice) if choice.tools is not None else choice.mode or "auto"


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    return {
        "type": "json_schema",
        "json_schema": {"name": form.name, "schema": form.schema_, "strict": form.strict},
    }

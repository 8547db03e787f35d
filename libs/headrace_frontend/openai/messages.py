"""The messages and tools in the bodies of chats. Their types only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace_common.limits import CHAT_MESSAGES_MAX, CHAT_TOOLS_MAX

_PARTS_MAX = 256


class Body(BaseModel):
    """A JSON object without other fields than those named."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class ContentPart(Body):
    """A part of a message. Only text is supported."""

    type: str
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check(cls, value: Any) -> Any:
        kind = value.get("type", "text") if isinstance(value, dict) else "text"
        if kind != "text":
            raise ValueError(
                f"type: {str(kind)[:64]!r} is not supported; send parts of type 'text'"
            )
        return value


Content = str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=_PARTS_MAX)]


class FunctionCallBody(Body):
    """A call of a function, with its arguments as JSON text."""

    name: str
    arguments: str | None = None


class ToolCallBody(Body):
    """A call that the model made in an earlier message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCallBody
    index: int | None = None


class MessageBody(Body):
    """One message of a chat. Fields of a response's message are accepted too, so that it can be sent back."""

    role: str
    content: Content | None = None
    name: str | None = None
    tool_calls: (
        Annotated[list[ToolCallBody], Field(fail_fast=True, max_length=CHAT_TOOLS_MAX)] | None
    ) = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Responses of OpenAI have these. They say nothing to the model.
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    @model_validator(mode="after")
    def _check(self) -> MessageBody:
        if self.function_call is not None:
            raise ValueError("function_call: is not supported; use tool_calls")
        if self.audio is not None:
            raise ValueError("audio: is not supported; send text")
        return self


Messages = Annotated[
    list[MessageBody], Field(fail_fast=True, min_length=1, max_length=CHAT_MESSAGES_MAX)
]


class FunctionBody(Body):
    """A function that the model may call. `parameters` is a JSON Schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: FunctionBody


Tools = Annotated[list[ToolBody], Field(fail_fast=True, max_length=CHAT_TOOLS_MAX)]


class FunctionName(Body):
    """The function that must be called."""

    name: str


class NamedToolChoice(Body):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice

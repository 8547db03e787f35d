"""The messages and tools in the bodies of chats. Their types only."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from headrace_common.errors import InvalidRequest
from headrace_common.limits import CHAT_MESSAGES_MAX, CHAT_TOOLS_MAX
from headrace_frontend.openai.data_url import data_of, is_data_url

_LOG = logging.getLogger(__name__)
_PARTS_MAX = 256
_IMAGE_TYPES: Final = ("image_url", "input_image")
_UNKNOWN_MAX = 16
_LOGGED_MAX = 1_000
_NAME_CHARACTERS_MAX = 128
_NO_NAME_CHARACTER = re.compile(r"[^A-Za-z0-9_.-]")
# The field that has the text of a part, by the part's type.
_PART_TEXTS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}


class Body(BaseModel):
    """A JSON object. A field that is null counts as left out. Unknown fields are kept for `unknown_fields`."""

    model_config = ConfigDict(extra="allow", strict=True, populate_by_name=True)

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields that never change an answer. They are dropped."""
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Fields that would change an answer, with the values that do not. Other values are rejected."""

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields with older names and forms replaced. Raises ValueError with "FIELD: remedy"."""
        return fields

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kept = {
            name: item
            for name, item in value.items()
            if item is not None and name not in cls.without_effect
        }
        for name in cls.neutral.keys() & kept.keys():
            if kept.pop(name) not in cls.neutral[name]:
                raise ValueError(f"{name}: is not supported; leave it out")
        return cls.translated(kept)


class UnknownFields:
    """Finds the fields of bodies that no class names. Each name is logged once, or all of them are `rejected`."""

    def __init__(self, *, rejected: bool) -> None:
        self._rejected = rejected
        self._logged: set[str] = set()

    def check(self, body: Body) -> list[str]:
        """The paths of some unknown fields, without the indexes of lists. Raises InvalidRequest to reject them."""
        found = (
            _NO_NAME_CHARACTER.sub("_", path)[:_NAME_CHARACTERS_MAX] for path in _unknown(body)
        )
        paths = sorted(set(islice(found, _UNKNOWN_MAX)))
        if paths and self._rejected:
            remedy = "is not a field of this request; correct its name or leave it out"
            raise InvalidRequest(dict.fromkeys(paths, remedy), cause="unknown_parameter")
        for path in paths:
            if path not in self._logged and len(self._logged) < _LOGGED_MAX:
                self._logged.add(path)
                _LOG.warning("requests have the field %s, which is ignored", path)
        return paths


def _unknown(body: Body, path: str = "") -> Iterator[str]:
    """The paths may repeat."""
    for name in body.model_extra or ():
        yield f"{path}{name}"
    for name in body.model_fields_set:
        value = getattr(body, name)
        if isinstance(value, Body):
            yield from _unknown(value, f"{path}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for item in value:
                yield from _unknown(item, f"{path}{name}.")


class ImageUrlBody(Body):
    """An image: a data: URL, or an address, from which `ImageFetcher` fetches it."""

    # Every image has the resolution that the model's processor gives it.
    without_effect = frozenset({"detail"})

    url: str
    _data: bytes = PrivateAttr(b"")

    @model_validator(mode="before")
    @classmethod
    def _read_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _decode(self) -> ImageUrlBody:
        if is_data_url(self.url):
            self.set_data(data_of(self.url))
            # It is as long as the image.
            self.url = ""
        return self

    @property
    def data(self) -> bytes:
        """The file. Empty until it is fetched."""
        return self._data

    def set_data(self, data: bytes) -> None:
        """Stores the file."""
        self._data = data


class ContentPart(Body):
    """A part of a message: an image, or else text."""

    text: str
    image_url: ImageUrlBody | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_text(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        kind = fields.pop("type", "text")
        if kind in _IMAGE_TYPES:
            fields.pop("detail", None)
            if "image_url" not in fields:
                raise ValueError("image_url: is missing; send a data: URL")
            return {**fields, "text": ""}
        name = _PART_TEXTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise ValueError(
                f"type: {str(kind)[:64]!r} is not supported; send parts of type 'text' and 'image_url'"
            )
        return {"text": fields.pop(name), **fields} if name in fields else fields


Content = str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=_PARTS_MAX)]


class FunctionCallBody(Body):
    """A call of a function, with its arguments as JSON text."""

    name: str
    arguments: str = ""


class ToolCallBody(Body):
    """A call that the model made in an earlier message."""

    without_effect = frozenset({"index"})

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCallBody


class MessageBody(Body):
    """One message of a chat. Fields of a response's message are accepted too, so that it can be sent back."""

    # Responses of OpenAI have these. They say nothing to the model.
    without_effect = frozenset({"refusal", "annotations"})
    neutral = {"audio": ()}

    role: str
    content: Content = ""
    name: str = ""
    tool_calls: (
        Annotated[list[ToolCallBody], Field(fail_fast=True, max_length=CHAT_TOOLS_MAX)] | None
    ) = None
    tool_call_id: str = ""
    reasoning_content: str = ""
    reasoning: str = ""

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if fields.get("role") == "function":
            fields["role"] = "tool"
        if "function_call" in fields:
            call = fields.pop("function_call")
            fields.setdefault("tool_calls", [{"type": "function", "function": call}])
        return fields

    @property
    def text(self) -> str:
        """The content as one text. Parts are lines of it, as in vLLM."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)

    @property
    def has_image(self) -> bool:
        """Whether the content has an image."""
        parts = () if isinstance(self.content, str) else self.content
        return any(part.image_url is not None for part in parts)


Messages = Annotated[
    list[MessageBody], Field(fail_fast=True, min_length=1, max_length=CHAT_MESSAGES_MAX)
]


class FunctionBody(Body):
    """A function that the model may call. `parameters` is a JSON Schema."""

    name: str
    description: str = ""
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

    type: Literal["function"] = "function"
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice

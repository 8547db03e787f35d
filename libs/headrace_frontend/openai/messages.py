"""The messages and tools in the bodies of chats. Their types only."""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote_to_bytes

from pydantic import Field, PrivateAttr, model_validator

from headrace_common.limits import CHAT_MESSAGES_MAX, CHAT_TOOLS_MAX
from headrace_frontend.openai.body import Body

_PARTS_MAX = 256
_IMAGE_TYPES: Final = ("image_url", "input_image")
_SCHEME: Final = "data:"
# Some clients name no type of their images, or a wrong one.
_OTHER_TYPES: Final = ("audio/", "video/", "text/", "application/pdf")
_HEAD_CHARACTERS_MAX: Final = 256
# Some 0.3 ms. A multiple of four characters, which are three bytes.
_PIECE_CHARACTERS: Final = 65_536
# The field that has the text of a part, by the part's type.
_PART_TEXTS: Mapping[str, str] = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}


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
        if _is_data_url(self.url):
            self.set_data(_data_of(self.url))
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

    def moved_data(self) -> bytes:
        """The file, which is not kept here any more."""
        data, self._data = self._data, b""
        return data


class ContentPart(Body):
    """A part of a message: an image, or else text."""

    without_effect = frozenset({"prompt_cache_breakpoint"})
    older = frozenset({"type"})

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
    neutral = {"audio": ()}  # noqa: RUF012
    older = frozenset({"function_call"})

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


class AllowedTools(Body):
    """The choice of some functions. The model sees no others."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] = Field(max_length=CHAT_TOOLS_MAX)

    def among(self, tools: list[Any]) -> list[Any]:
        """Those of a chat's tools that are allowed."""
        names = set(map(_name_of, self.tools))
        return [tool for tool in tools if _name_of(tool) in names]


def _name_of(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return str(function.get("name")) if isinstance(function, dict) else ""


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def _is_data_url(url: str) -> bool:
    """Whether the URL contains the file itself."""
    return url[: len(_SCHEME)].lower() == _SCHEME


def _data_of(url: str) -> bytes:
    """The file in a data: URL. Raises ValueError with "url: remedy"."""
    head, comma, _ = url[:_HEAD_CHARACTERS_MAX].partition(",")
    media_type, *options = head[len(_SCHEME) :].lower().split(";")
    if not comma or "base64" not in options:
        raise ValueError("url: must be data:image/...;base64, and the file in base64")
    if media_type.startswith(_OTHER_TYPES):
        raise ValueError(f"url: {media_type[:64]!r} is not supported; send an image")
    try:
        content = url[url.index(",") + 1 :].encode("ascii")
        data = _decoded(b"".join(_unescaped(content)) if b"%" in content else content)
    except ValueError:
        data = b""
    if not data:
        raise ValueError("url: has no file in base64 after the comma")
    return data


def _unescaped(content: bytes) -> Iterator[bytes]:
    """In pieces with whole escapes, since what is between two escapes becomes an object of its own."""
    start = 0
    while piece := content[start : start + _PIECE_CHARACTERS]:
        cut = piece.rfind(b"%", -2)
        piece = piece[:cut] if cut > 0 else piece
        yield unquote_to_bytes(piece)
        start += len(piece)


def _decoded(content: bytes) -> bytes:
    """In pieces, since each keeps the global interpreter lock."""
    if any(space in content for space in (b"\n", b"\r", b" ")):
        content = content.translate(None, b"\n\r ")
    return b"".join(
        binascii.a2b_base64(content[start : start + _PIECE_CHARACTERS])
        for start in range(0, len(content), _PIECE_CHARACTERS)
    )

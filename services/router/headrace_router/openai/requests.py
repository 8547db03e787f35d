"""The bodies of OpenAI requests. Their types only: the values are checked with those of gRPC requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_common.errors import InvalidRequest
from headrace_common.limits import CHAT_MESSAGES_MAX

CHOICES_MAX = 16
PROMPTS_MAX = 64
_PARTS_MAX = 256
_STOPS_MAX = 64
_TOKENS_MAX = 4_194_304

Uint32 = Annotated[int, Field(ge=0, lt=2**32)]
Uint64 = Annotated[int, Field(ge=0, lt=2**64)]
TokenList = Annotated[list[Uint32], Field(fail_fast=True, min_length=1, max_length=_TOKENS_MAX)]
Prompt: TypeAlias = (
    str
    | TokenList
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)]
    | Annotated[list[TokenList], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)]
)


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """Options of a streamed response."""

    include_usage: bool = False


class GenerationBody(_Body):
    """The fields that completions and chat completions share. Names are OpenAI's, or else vLLM's."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = None
    max_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**32)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Uint64 | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=_STOPS_MAX)] | None = None
    stop_token_ids: TokenList | None = None
    ignore_eos: bool = False
    logit_bias: dict[str, float] | None = None
    # These describe the caller's records, not the response.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def choice_count(self) -> int:
        """Completions of each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """Whether a streamed response ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only for stream=true; leave it out")
        if self.logit_bias:
            raise ValueError("logit_bias: is not supported; leave it out")
        return self


class ContentPart(_Body):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class MessageBody(_Body):
    """One message of a chat."""

    role: str
    content: (
        str | Annotated[list[ContentPart], Field(fail_fast=True, max_length=_PARTS_MAX)] | None
    ) = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Any = None
    tool_call_id: str | None = None

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
        if self.tool_calls:
            raise ValueError("tool_calls are not supported; write them into the content")
        return self


class ResponseFormat(_Body):
    """The format of the answer. Only text is supported."""

    type: Literal["text"]


class ChatCompletionBody(GenerationBody):
    """A request of /v1/chat/completions."""

    messages: Annotated[
        list[MessageBody], Field(fail_fast=True, min_length=1, max_length=CHAT_MESSAGES_MAX)
    ]
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionBody:
        if self.tools:
            raise ValueError("tools: are not supported; leave it out")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs=true")
        if not self.add_generation_prompt and not self.continue_final_message:
            raise ValueError(
                "add_generation_prompt: false needs continue_final_message=true; leave it out"
            )
        return self


class CompletionBody(GenerationBody):
    """A request of /v1/completions."""

    prompt: Prompt
    logprobs: Uint32 | None = None
    best_of: int | None = None
    echo: bool = False
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        if self.echo:
            raise ValueError("echo: is not supported; put the prompt before the text yourself")
        if self.suffix:
            raise ValueError("suffix: is not supported; leave it out")
        if self.best_of is not None and self.best_of != self.choice_count:
            raise ValueError("best_of: must equal n; leave it out")
        return self


class TokenizeBody(_Body):
    """A request of /tokenize, as vLLM has it. One of prompt and messages must be set."""

    model: str = ""
    prompt: str | None = None
    messages: (
        Annotated[
            list[MessageBody], Field(fail_fast=True, min_length=1, max_length=CHAT_MESSAGES_MAX)
        ]
        | None
    ) = None
    continue_final_message: bool = False


class DetokenizeBody(_Body):
    """A request of /detokenize, as vLLM has it."""

    model: str = ""
    tokens: TokenList


Body = TypeVar("Body", bound=_Body)


def parse_body(kind: type[Body], data: bytes) -> Body:
    """The body in `data`. Raises InvalidRequest that names the wrong fields."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise InvalidRequest(_violations(error)) from None


def _violations(error: ValidationError) -> dict[str, str]:
    violations: dict[str, str] = {}
    for item in error.errors(include_url=False, include_input=False, include_context=False)[:16]:
        message = item["msg"].removeprefix("Value error, ")
        path = _path(item["loc"])
        field, colon, remedy = message.partition(": ")
        if not path and colon and field.isidentifier():
            path, message = field, remedy
        if item["type"] == "extra_forbidden":
            message = "is not a field of this request; correct its name or leave it out"
        # The members of a union have a violation each.
        name = path or "body"
        violations[name] = f"{violations[name]}, or: {message}" if name in violations else message
    return violations


def _path(location: tuple[int | str, ...]) -> str:
    """A field's path such as messages[0].content. Drops the names that pydantic adds for the members of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            if path and part in ("str", "int"):
                continue
            path += f".{part}" if path else part
    return path

"""The bodies of OpenAI requests. Their types only: the values are checked with those of gRPC requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from headrace_common.errors import InvalidRequest
from headrace_common.limits import (
    ALLOWED_TOKENS_MAX,
    ANSWERS_MAX,
    BAD_WORDS_MAX,
    CHOICE_TEXTS_MAX,
    LOGIT_BIASES_MAX,
    TTFT_TARGET_MAX_S,
)
from headrace_frontend.openai.messages import Body, Messages, ToolChoice, Tools

PROMPTS_MAX = 64
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


_NO_TEXT = "Input should be a valid string"
# A remedy that a validator gives for one field.
_FIELD_REMEDY = re.compile(r"([a-z_]+): (.*)", re.DOTALL)


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool = False
    # Without effect here: OpenAI pads events with it.
    include_obfuscation: bool | None = None


class StructuredOutputsBody(Body):
    """vLLM's structured outputs. One of the fields must be set."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=CHOICE_TEXTS_MAX)] | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class GenerationBody(Body):
    """The fields that completions and chat completions share. Names are OpenAI's, or else vLLM's."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=ANSWERS_MAX)] | None = None
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
    min_tokens: Uint32 = 0
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=BAD_WORDS_MAX)] | None = None
    allowed_token_ids: (
        Annotated[list[Uint32], Field(fail_fast=True, max_length=ALLOWED_TOKENS_MAX)] | None
    ) = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=LOGIT_BIASES_MAX)] | None = None
    structured_outputs: StructuredOutputsBody | None = None
    prompt_logprobs: int | None = None
    priority: Literal[-1, 0, 1] | None = None
    include_latency: bool = False
    ttft_target_s: (
        Annotated[float, Field(gt=0, le=TTFT_TARGET_MAX_S, allow_inf_nan=False)] | None
    ) = None
    # These describe the caller's records, not the response.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_retention: str | None = None
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
        if self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: is not supported; leave it out")
        for token in self.logit_bias or ():
            if not token.isdecimal() or int(token) >= 2**32:
                raise ValueError(f"logit_bias: {token[:64]!r} is no token id; write it in digits")
        return self


class JsonSchemaBody(Body):
    """The schema of an answer."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormatBody(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormatBody:
        schema = None if self.json_schema is None else self.json_schema.schema_
        if (self.type == "json_schema") != (schema is not None):
            raise ValueError("json_schema: needs schema, and type json_schema needs json_schema")
        return self


class ChatCompletionBody(GenerationBody):
    """A request of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Uint32 | None = None
    response_format: ResponseFormatBody | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    modalities: list[Literal["text"]] | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return {**effort, **(self.chat_template_kwargs or {})}

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs=true")
        if not self.add_generation_prompt and not self.continue_final_message:
            raise ValueError(
                "add_generation_prompt: false needs continue_final_message=true; leave it out"
            )
        formatted = self.response_format is not None and self.response_format.type != "text"
        if formatted and self.structured_outputs is not None:
            raise ValueError("structured_outputs: response_format sets the form too; leave one out")
        return self


class CompletionBody(GenerationBody):
    """A request of /v1/completions."""

    prompt: Prompt
    logprobs: Uint32 | None = None
    best_of: Uint32 | None = None
    echo: bool = False
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionBody:
        if self.echo:
            raise ValueError("echo: is not supported; put the prompt before the text yourself")
        if self.suffix:
            raise ValueError("suffix: is not supported; leave it out")
        return self


class TokenizeBody(Body):
    """A request of /tokenize, as vLLM has it. One of prompt and messages must be set."""

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens: the template of a chat decides; leave it out")
        return self


class DetokenizeBody(Body):
    """A request of /detokenize, as vLLM has it."""

    model: str = ""
    tokens: TokenList


BodyKind = TypeVar("BodyKind", bound=BaseModel)


def parse_body(kind: type[BodyKind], data: bytes) -> BodyKind:
    """The body in `data`. Raises InvalidRequest that names the wrong fields."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise InvalidRequest(_violations(error)) from None


def checked_body(kind: type[BodyKind], value: Mapping[str, Any]) -> BodyKind:
    """As `parse_body`, of a body that another API's body asks for."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise InvalidRequest(_violations(error)) from None


def _violations(error: ValidationError) -> dict[str, str]:
    violations: dict[str, str] = {}
    for item in error.errors(include_url=False, include_input=False, include_context=False)[:16]:
        message = item["msg"].removeprefix("Value error, ")
        path = _path(item["loc"])
        named = _FIELD_REMEDY.fullmatch(message) if item["type"] == "value_error" else None
        if named is not None:
            path, message = f"{path}.{named[1]}" if path else named[1], named[2]
        if item["type"] == "extra_forbidden":
            message = "is not a field of this request; correct its name or leave it out"
        # The members of a union have a violation each.
        name = path or "body"
        violations[name] = f"{violations[name]}, or: {message}" if name in violations else message
    # Where a part of a list is wrong, a text was only the alternative to the list.
    return {
        name: message
        for name, message in violations.items()
        if message != _NO_TEXT or not any(other.startswith(f"{name}[") for other in violations)
    }


def _path(location: tuple[int | str, ...]) -> str:
    """A field's path such as messages[0].content. Drops the names that pydantic adds for the members of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            # The names of our own classes, too, are not of the client's body.
            if path and (part in ("str", "int", "dict") or part[0].isupper()):
                continue
            path += f".{part}" if path else part
    return path

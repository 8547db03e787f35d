"""The bodies of OpenAI requests. Their types only: the values are checked with those of gRPC requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from headrace_common.limits import (
    ALLOWED_TOKENS_MAX,
    ANSWERS_MAX,
    BAD_WORDS_MAX,
    CHAT_TOOLS_MAX,
    CHOICE_TEXTS_MAX,
    KEEP_MAX_S,
    LOGIT_BIASES_MAX,
    REQUEST_TIMEOUT_MAX_S,
    SCHEMA_BYTES_MAX,
    TOKEN_TARGET_MAX_S,
)
from headrace_frontend.openai.body import Body
from headrace_frontend.openai.messages import (
    AllowedTools,
    Messages,
    NamedToolChoice,
    ToolChoice,
    Tools,
)
from headrace_frontend.promises import ttl_s
from headrace_frontend.request.json_text import JsonRejected, parse_object
from headrace_frontend.request.schema import enforceable

PROMPTS_MAX = 128
_CHOICES_MAX = 1_024
_STOPS_MAX = 64
_TOKENS_MAX = 4_194_304
COMPLETION_TOKENS = 16
"""Tokens of a completion without max_tokens, as OpenAI has it."""


def _whole(value: Any) -> Any:
    """A number such as 2.0 as an integer: JSON has one kind of numbers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole)]
# The bounds come first: pydantic's own check them.
Uint32 = Annotated[int, Field(ge=0, lt=2**32), BeforeValidator(_whole)]
Token = Annotated[int, Field(ge=0, lt=2**32)]
TargetSeconds = Annotated[float, Field(gt=0, le=TOKEN_TARGET_MAX_S, allow_inf_nan=False)] | None
TokenList = Annotated[list[Token], Field(fail_fast=True, max_length=_TOKENS_MAX)]
PromptTokens = Annotated[TokenList, Field(min_length=1)]
PromptField: TypeAlias = (
    str
    | PromptTokens
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)]
    | Annotated[list[PromptTokens], Field(fail_fast=True, min_length=1, max_length=PROMPTS_MAX)]
)


_NO_VALUE: Final = ()
_INDEX: Final = re.compile(r"\[\d+\]")
# Constraints of the answer by the names that vLLM had before, and that SGLang has.
_CONSTRAINTS: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


class Includes(NamedTuple):
    """What a response has besides its choices."""

    usage: bool = False
    continuous_usage: bool = False
    """Whether each event has the usage so far."""
    token_ids: bool = False
    """Whether the tokens of prompt and answers are returned."""
    prompt_text: bool = False
    """Whether the text of each choice begins with that of the prompt."""
    prompt_logprobs: bool = False
    """Whether the tokens of the prompt are returned with their log probabilities."""
    names_tokens_by_id: bool = False
    """Whether logprobs have "token_id:5" in place of the token's text."""

    @property
    def prompt(self) -> bool:
        """Whether each event depends on the prompt's tokens."""
        return self.continuous_usage or self.token_ids


class StreamOptions(Body):
    """Options of a streamed response."""

    # OpenAI pads events with it.
    without_effect = frozenset({"include_obfuscation"})

    include_usage: bool = False
    continuous_usage_stats: bool = False


_NO_OPTIONS: Final = StreamOptions()


class SchemaBody(Body):
    """A body with JSON Schemas that an answer must match. Keywords that no engine enforces are ignored fields."""

    def enforce(self, name: str, schema: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
        """The schema in the field `name` as engines enforce it. Raises ValueError for less where it is strict."""
        enforced, lacking = enforceable(schema)
        if lacking and strict:
            raise ValueError(f"{name}: {lacking[0]} cannot be enforced; leave it, or strict, out")
        if lacking and self.__pydantic_extra__ is not None:
            place = _INDEX.sub("", name)
            self.__pydantic_extra__.update((f"{place}.{path}", None) for path in lacking)
        return enforced


class StructuredOutputsBody(SchemaBody):
    """vLLM's structured outputs. One of the fields must be set."""

    neutral = {  # noqa: RUF012
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": _NO_VALUE,
    }

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, max_length=CHOICE_TEXTS_MAX)] | None = None
    grammar: str | None = None
    structural_tag: str | None = None

    @model_validator(mode="after")
    def _enforce(self) -> StructuredOutputsBody:
        given = self.json_
        if isinstance(given, str):
            # The text that is no schema is reported with the whole request.
            with suppress(JsonRejected):
                given = parse_object(given, SCHEMA_BYTES_MAX)
        if isinstance(given, dict) and (enforced := self.enforce("json", given)) != given:
            self.json_ = enforced
        return self


class JsonSchemaBody(SchemaBody):
    """The schema of an answer."""

    # They describe the schema.
    without_effect = frozenset({"name", "description"})

    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool = False

    @model_validator(mode="after")
    def _enforce(self) -> JsonSchemaBody:
        if self.schema_ is not None:
            self.schema_ = self.enforce("schema", self.schema_, strict=self.strict)
        return self


class ResponseFormatBody(SchemaBody):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaBody | None = None
    # Of a structural tag.
    format: Any = None
    structures: Any = None
    triggers: Any = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormatBody:
        schema = None if self.json_schema is None else self.json_schema.schema_
        if (self.type == "json_schema") != (schema is not None):
            raise ValueError("json_schema: needs schema, and type json_schema needs json_schema")
        for index, one in enumerate(self.structures if isinstance(self.structures, list) else ()):
            if isinstance(one, dict) and isinstance(one.get("schema"), dict):
                one["schema"] = self.enforce(f"structures[{index}].schema", one["schema"])
        return self


class GenerationBody(Body):
    """The fields that completions and chat completions share. Names are OpenAI's, or else vLLM's."""

    # These describe the caller's records, not the response.
    without_effect = frozenset(
        {
            *("user", "metadata", "store", "service_tier", "safety_identifier", "session_id"),
        }
    )
    neutral = {  # noqa: RUF012
        **dict.fromkeys(("use_beam_search", "early_stopping", "watermarking"), (False,)),
        **dict.fromkeys(("truncate_prompt_tokens", "repetition_detection"), _NO_VALUE),
        "length_penalty": (1,),
        "logprob_token_ids": ([],),
        "spaces_between_special_tokens": (True,),
        "thinking_token_budget": (-1,),
        "guided_whitespace_pattern": _NO_VALUE,
        # Of SGLang, TGI and llama.cpp.
        **dict.fromkeys(("lora_path", "custom_logit_processor"), _NO_VALUE),
        **dict.fromkeys(("dry_multiplier", "mirostat", "xtc_probability"), (0,)),
        "no_stop_trim": (False,),
        "typical_p": (1,),
    }

    older = frozenset(_CONSTRAINTS)

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, Field(ge=1, le=ANSWERS_MAX)] = 1
    max_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[Integer, Field(ge=-1, lt=2**32)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=_STOPS_MAX)] | None = None
    stop_token_ids: TokenList | None = None
    ignore_eos: bool = False
    min_tokens: Uint32 = 0
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=BAD_WORDS_MAX)] | None = None
    allowed_token_ids: Annotated[PromptTokens, Field(max_length=ALLOWED_TOKENS_MAX)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    prompt_logprobs: Uint32 | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=LOGIT_BIASES_MAX)] | None = None
    structured_outputs: StructuredOutputsBody | None = None
    response_format: ResponseFormatBody | None = None
    priority: Annotated[Literal[-1, 0, 1], BeforeValidator(_whole)] = 0
    cache_salt: Annotated[str, Field(min_length=1)] = ""
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""
    prompt_cache_options: dict[str, Any] | None = None
    request_id: str = ""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    include_latency: bool = False
    ttft_target_s: TargetSeconds = None
    tpot_target_s: TargetSeconds = None

    timeout_s: (
        Annotated[float, Field(gt=0, le=REQUEST_TIMEOUT_MAX_S, allow_inf_nan=False)] | None
    ) = None

    @cached_property
    def includes(self) -> Includes:
        """What the response has besides its choices."""
        options = self.stream_options or _NO_OPTIONS
        return Includes(
            usage=options.include_usage,
            continuous_usage=options.include_usage and options.continuous_usage_stats,
            token_ids=self.return_token_ids,
            prompt_text=self.echoed,
            names_tokens_by_id=self.return_tokens_as_token_ids,
            prompt_logprobs=self.prompt_logprobs is not None and not self.stream,
        )

    @property
    def keep_s(self) -> float:
        """How long the KV shall stay after the answer, by OpenAI's fields. 0 without them."""
        options, retention = self.prompt_cache_options, self.prompt_cache_retention
        if options is None and not (retention or self.prompt_cache_key):
            return 0.0
        ttl = "" if options is None else options.get("ttl", "30m")
        shortest = "5m" if retention or self.prompt_cache_key else ""
        return max(map(ttl_s, (ttl, retention, shortest)))

    @property
    def echoed(self) -> bool:
        """Whether the answers begin with the prompt."""
        return False

    @property
    def formatted(self) -> bool:
        """Whether response_format sets the form of the answer."""
        return self.response_format is not None and self.response_format.type != "text"

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name in _CONSTRAINTS.keys() & fields.keys():
            outputs = fields.get("structured_outputs", {})
            if not isinstance(outputs, dict) or _CONSTRAINTS[name] in outputs:
                raise ValueError(f"{name}: structured_outputs is given too; leave one out")
            fields["structured_outputs"] = {**outputs, _CONSTRAINTS[name]: fields.pop(name)}
        return fields

    @model_validator(mode="after")
    def _check(self) -> GenerationBody:
        options = self.stream_options
        if options is not None and options.model_fields_set and not self.stream:
            raise ValueError("stream_options: only for stream=true; leave it out")
        if self.stream and self.prompt_logprobs:
            raise ValueError("prompt_logprobs: only for stream=false; leave it out")
        for token in self.logit_bias or ():
            if not token.isdecimal() or int(token) >= 2**32:
                raise ValueError(f"logit_bias: {token[:64]!r} is no token id; write it in digits")
        if self.formatted and self.structured_outputs is not None:
            raise ValueError("structured_outputs: response_format sets the form too; leave one out")
        return self


class ChatCompletionBody(GenerationBody, SchemaBody):
    """A request of /v1/chat/completions."""

    neutral = {  # noqa: RUF012
        **GenerationBody.neutral,
        **dict.fromkeys(("echo", "add_special_tokens"), (False,)),
        **dict.fromkeys(("chat_template", "web_search_options", "moderation"), _NO_VALUE),
        "documents": ([],),
        "modalities": (["text"], []),
        "separate_reasoning": (True,),
    }
    older = GenerationBody.older | {"functions", "function_call", "tool_choice"}

    messages: Messages
    max_completion_tokens: Uint32 | None = None
    logprobs: bool = False
    top_logprobs: Uint32 = 0
    tools: Annotated[Tools, Field(min_length=1)] | None = None
    tool_choice: ToolChoice | None = None
    functions: list[Any] | None = None
    """Set when the request has OpenAI's older form of tools, which `tools` has too."""
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @cached_property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        given = self.chat_template_kwargs or {}
        effort = self.reasoning_effort
        return given if effort is None else {"reasoning_effort": effort, **given}

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        fields = super().translated(fields)
        functions = fields.get("functions")
        if isinstance(functions, list):
            if "tools" in fields:
                raise ValueError("functions: tools are given too; leave one out")
            given = functions[: CHAT_TOOLS_MAX + 1]
            fields["tools"] = [{"type": "function", "function": one} for one in given]
        if "function_call" in fields:
            call = fields.pop("function_call")
            call = {"type": "function", "function": call} if isinstance(call, dict) else call
            fields.setdefault("tool_choice", call)
        choice, tools = fields.get("tool_choice"), fields.get("tools")
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = AllowedTools.model_validate(choice.get("allowed_tools", choice))
            fields["tool_choice"] = allowed.mode
            if isinstance(tools, list):
                fields["tools"] = allowed.among(tools)
        return fields

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: needs logprobs=true")
        _check_ending(self)
        if not self.add_generation_prompt and not self.continue_final_message:
            raise ValueError(
                "add_generation_prompt: false needs continue_final_message=true; leave it out"
            )
        if self.tool_choice not in (None, "none") and not self.tools:
            raise ValueError("tool_choice: needs tools; set tools or leave it out")
        for index, tool in enumerate(self.tools or ()):
            function = tool.function
            if function.parameters and self.forces(function.name):
                # The model reads the schema as it is. The answer's form is made with the request.
                place = f"tools[{index}].function.parameters"
                self.enforce(place, function.parameters, strict=function.strict is True)
        return self

    def forces(self, name: str) -> bool:
        """Whether the answer is a call, which may be of this function."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return self.tool_choice.function.name == name
        return self.tool_choice == "required"


def _check_ending(body: ChatCompletionBody | TokenizeBody) -> None:
    """Raises ValueError when an answer would both begin and continue the final message."""
    begins = body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set
    if begins and body.continue_final_message:
        raise ValueError(
            "continue_final_message: true needs add_generation_prompt=false; leave one out"
        )


class CompletionBody(GenerationBody):
    """A request of /v1/completions."""

    neutral = {  # noqa: RUF012
        **GenerationBody.neutral,
        "suffix": ("",),
        "add_special_tokens": (True,),
        "prompt_embeds": ([],),
    }

    prompt: PromptField
    max_tokens: Uint32 = COMPLETION_TOKENS
    logprobs: Uint32 | None = None
    best_of: Uint32 = 0
    echo: bool = False

    @property
    def echoed(self) -> bool:
        return self.echo

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionBody:
        is_list = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        prompts = len(self.prompt) if is_list else 1
        if prompts * self.n > _CHOICES_MAX:
            raise ValueError(f"n: times prompts must be at most {_CHOICES_MAX}; send fewer prompts")
        return self

    @property
    def generates(self) -> bool:
        """Whether the choices have more than the prompt."""
        return self.max_tokens > 0 or not self.echo


class KeepBody(Body):
    """A request of /v1/headrace/keep, see InferenceService.Keep."""

    id: str
    seconds: Annotated[float, Field(ge=0, le=KEEP_MAX_S, allow_inf_nan=False)] = 0.0


class TokenizeBody(Body):
    """A request of /tokenize, as vLLM has it. One of prompt and messages must be set."""

    # vLLM's servers reject the template of a request, too, unless they are started to trust it.
    neutral = {"chat_template": _NO_VALUE}  # noqa: RUF012

    model: str = ""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer's special tokens stand around the prompt. A chat has those of its template."""
        given = self.add_special_tokens
        return self.messages is None if given is None else given

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        _check_ending(self)
        return self


class DetokenizeBody(Body):
    """A request of /detokenize, as vLLM has it."""

    model: str = ""
    tokens: TokenList

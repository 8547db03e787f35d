"""Converts OpenAI requests into those of the InferenceService. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

from headrace.inference.v1 import inference_pb2, priority_pb2, sampling_pb2, tools_pb2
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import InvalidRequest
from headrace_frontend.openai.messages import FunctionBody, MessageBody, ToolBody, ToolChoice
from headrace_frontend.openai.requests import (
    ChatCompletionBody,
    CompletionBody,
    GenerationBody,
    PromptField,
    ResponseFormatBody,
    StructuredOutputsBody,
    TokenizeBody,
)
from headrace_frontend.promises import KEEP_HEADER
from headrace_frontend.request.chat import forces_call
from headrace_frontend.request.sampling import SEED_MAX
from headrace_frontend.request.validation import REQUEST_ID_CHARACTERS_MAX

_NO_ID_CHARACTER = re.compile(r"[^!-~]")
_SAME_NAMES = {
    *("temperature", "top_p", "min_p", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("include_stop_str_in_output", "skip_special_tokens"),
}
_SAME_LISTS = {"stop_token_ids", "bad_words", "allowed_token_ids"}
# vLLM serves smaller numbers first.
_PRIORITIES = {
    -1: priority_pb2.PRIORITY_HIGH,
    0: priority_pb2.PRIORITY_UNSPECIFIED,
    1: priority_pb2.PRIORITY_LOW,
}
# Fields of gRPC's requests that have another name, or another place, in OpenAI's.
_RENAMED = (
    (re.compile(r"^chat\.tools\[(\d+)\]\."), r"tools[\1].function."),
    (re.compile(r"^chat\.tool_choice\..*"), "tool_choice"),
    (re.compile(r"\.parts(\[\d+\])"), r".content\1"),
    (re.compile(r"(\.content\[\d+\])\.image(\.data)?$"), r"\1.image_url.url"),
    (re.compile(r"^chat\.template_kwargs"), "chat_template_kwargs"),
    (re.compile(r"(\.tool_calls\[\d+\])\.(name|arguments)"), r"\1.function.\2"),
    (re.compile(r"^(tokens\.ids|text)"), "prompt"),
    (re.compile(r"^(sampling|chat)\."), ""),
    (re.compile(r"^(structured_outputs\.choice)\.texts"), r"\1"),
    (re.compile(r"^(ttft|tpot)_target$"), r"\1_target_s"),
)

_FIRST_NAME: Final = re.compile(r"\w+")


def id_of(text: str) -> str:
    """The text as an id of a request or a conversation: without other characters, and cut to the size limit."""
    return _NO_ID_CHARACTER.sub("_", text)[:REQUEST_ID_CHARACTERS_MAX]


def chat_request(body: ChatCompletionBody, request_id: str) -> inference_pb2.GenerateRequest:
    """The request of a chat."""
    request = _request(body, request_id)
    sampling, chat = request.sampling, request.chat
    _set_sampling(sampling, body)
    if body.max_completion_tokens is not None:
        sampling.max_tokens = body.max_completion_tokens
    if body.logprobs:
        sampling.logprobs = body.top_logprobs
    _set_chat(chat, body.messages, body.tools, body.template_variables)
    chat.continue_final_message = body.continue_final_message
    if body.tools and body.tool_choice is not None:
        single = not body.parallel_tool_calls
        chat.tool_choice.CopyFrom(_tool_choice(body.tool_choice, single=single))
        if forces_call(chat):
            sampling.ClearField("structured_outputs")
    return request


def completion_requests(
    body: CompletionBody, request_id: str
) -> list[inference_pb2.GenerateRequest]:
    """One request for each prompt."""
    prompts = enumerate(_prompts(body.prompt))
    return [_completion(body, _numbered(request_id, index), prompt) for index, prompt in prompts]


def _completion(
    body: CompletionBody, request_id: str, prompt: str | list[int]
) -> inference_pb2.GenerateRequest:
    request = _request(body, request_id)
    sampling, request.best_of = request.sampling, body.best_of
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.tokens.ids.extend(prompt)
    _set_sampling(sampling, body)
    if body.logprobs is not None:
        sampling.logprobs = body.logprobs
        if body.echo and not sampling.HasField("prompt_logprobs"):
            sampling.prompt_logprobs = body.logprobs
    if not body.generates:
        # The engine reports the prompt with the first token. The response leaves that out.
        sampling.max_tokens = 1
    return request


def tokenize_request(body: TokenizeBody) -> inference_pb2.GenerateRequest:
    """A request with the prompt to tokenize. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest({"prompt": "set one of prompt and messages"})
    if body.messages is None:
        return inference_pb2.GenerateRequest(model=body.model, text=body.prompt)
    request = inference_pb2.GenerateRequest(model=body.model)
    _set_chat(request.chat, body.messages, body.tools, body.chat_template_kwargs or {})
    request.chat.continue_final_message = body.continue_final_message
    return request


def openai_error(
    error: InvalidRequest,
    *,
    chat: bool,
    max_tokens: str = "max_tokens",
    renamed: Mapping[str, str] = MappingProxyType({}),
    formatted: bool = False,
    echoed: bool = False,
) -> InvalidRequest:
    """The error with the caller's names of the invalid fields.

    `max_tokens`: the name that was sent. `renamed`: names of chats and those of another API for them. `formatted`:
    response_format sets the form of the answer. `echoed`: an echo with logprobs sets the prompt's.
    """
    names = {
        "max_tokens": max_tokens,
        "logprobs": "top_logprobs" if chat else "logprobs",
        "keep": KEEP_HEADER,
    }
    if echoed:
        names["prompt_logprobs"] = "logprobs"
    if formatted:
        schema = "response_format.json_schema.schema"
        names |= {"structured_outputs.json": schema, "structured_outputs.grammar": schema}
    violations: dict[str, str] = {}
    for path, remedy in error.violations.items():
        field = path
        for pattern, name in _RENAMED:
            field = pattern.sub(name, field, count=1)
        field = names.get(field, field)
        first = _FIRST_NAME.match(field)
        if first is not None and first[0] in renamed:
            # Other APIs have the schema in the form itself.
            rest = field.removeprefix(first[0]).removeprefix(".json_schema")
            field = renamed[first[0]] + rest
        violations[field] = remedy
    return InvalidRequest(violations, cause=error.cause)


def _request(body: GenerationBody, request_id: str) -> inference_pb2.GenerateRequest:
    """A request with the fields that completions and chats share, but for the sampling."""
    request = inference_pb2.GenerateRequest(model=body.model, request_id=request_id, n=body.n)
    request.priority, request.cache_salt = _PRIORITIES[body.priority], body.cache_salt
    request.conversation_id = id_of(body.prompt_cache_key)
    request.include_latency = body.include_latency
    if body.ttft_target_s is not None:
        request.ttft_target.CopyFrom(duration_from_seconds(body.ttft_target_s))
    if body.tpot_target_s is not None:
        request.tpot_target.CopyFrom(duration_from_seconds(body.tpot_target_s))
    return request


def _numbered(request_id: str, index: int) -> str:
    """The id of the request for prompt `index`."""
    suffix = f"-{index}" if index else ""
    return f"{request_id[: REQUEST_ID_CHARACTERS_MAX - len(suffix)]}{suffix}"


def _set_sampling(sampling: sampling_pb2.SamplingParams, body: GenerationBody) -> None:
    given, sampling.min_tokens = body.model_fields_set, body.min_tokens
    if body.max_tokens is not None:
        sampling.max_tokens = body.max_tokens
    for name in _SAME_NAMES & given:
        setattr(sampling, name, getattr(body, name))
    for name in _SAME_LISTS & given:
        getattr(sampling, name).extend(getattr(body, name))
    if body.stop is not None:
        sampling.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop)
    for token, bias in (body.logit_bias or {}).items():
        sampling.logit_bias[int(token)] = bias
    if body.top_k is not None:
        # vLLM writes -1 for all tokens.
        sampling.top_k = max(0, body.top_k)
    # vLLM writes -1 for no seed, and counts other negative ones from the end of its range.
    if body.seed not in (None, -1):
        sampling.seed = body.seed if body.seed >= 0 else body.seed & SEED_MAX
    if body.prompt_logprobs is not None and not body.stream:
        sampling.prompt_logprobs = body.prompt_logprobs
    if body.structured_outputs is not None:
        sampling.structured_outputs.CopyFrom(_structured_outputs(body.structured_outputs))
    if body.response_format is not None:
        _set_response_format(sampling, body.response_format)


def _structured_outputs(body: StructuredOutputsBody) -> sampling_pb2.StructuredOutputs:
    """Raises InvalidRequest for more than one constraint, which the message cannot have."""
    given = body.model_dump(include=set(type(body).model_fields), exclude_none=True, by_alias=True)
    if isinstance(given.get("json"), dict):
        given["json"] = _json(given["json"])
    if "choice" in given:
        given["choice"] = sampling_pb2.Choice(texts=given["choice"])
    if len(given) > 1:
        raise InvalidRequest({"structured_outputs": f"set only one of {' and '.join(given)}"})
    return sampling_pb2.StructuredOutputs(**given)


def _set_response_format(sampling: sampling_pb2.SamplingParams, body: ResponseFormatBody) -> None:
    if body.type == "json_object":
        sampling.structured_outputs.json_object = True
    elif body.type == "structural_tag":
        sampling.structured_outputs.structural_tag = _json(body.model_dump(exclude_none=True))
    elif body.json_schema is not None and body.json_schema.schema_ is not None:
        sampling.structured_outputs.json = _json(body.json_schema.schema_)


def _set_chat(
    chat: inference_pb2.Chat,
    messages: list[MessageBody],
    tools: list[ToolBody] | None,
    variables: Mapping[str, Any],
) -> None:
    for message in messages:
        _set_message(chat.messages.add(), message)
    for tool in tools or ():
        _set_tool(chat.tools.add(), tool.function)
    if variables:
        chat.template_kwargs = _json(variables)


def chat_message(body: MessageBody) -> inference_pb2.ChatMessage:
    """One message."""
    message = inference_pb2.ChatMessage()
    _set_message(message, body)
    return message


def _set_message(message: inference_pb2.ChatMessage, body: MessageBody) -> None:
    """A message that is filled in its place is not copied, with the files of its images. They are moved."""
    # "function" is the older name.
    message.role = "tool" if body.role == "function" else body.role
    if isinstance(body.content, str):
        message.content = body.content
    elif body.has_image:
        for part in body.content:
            if part.image_url is not None:
                message.parts.add().image.data = part.image_url.moved_data()
            else:
                message.parts.add(text=part.text)
    else:
        message.content = body.text
    if body.name:
        message.name = body.name
    for call in body.tool_calls or ():
        function = call.function
        message.tool_calls.add(id=call.id, name=function.name, arguments=function.arguments)
    if body.tool_call_id:
        message.tool_call_id = body.tool_call_id
    reasoning = body.reasoning_content or body.reasoning
    if reasoning:
        message.reasoning = reasoning


def _set_tool(tool: tools_pb2.Tool, body: FunctionBody) -> None:
    tool.name, tool.description = body.name, body.description
    if body.parameters is not None:
        tool.parameters = _json(body.parameters)
    if body.strict is not None:
        tool.strict = body.strict


def _tool_choice(body: ToolChoice, *, single: bool) -> tools_pb2.ToolChoice:
    if not isinstance(body, str):
        mode = tools_pb2.ToolChoice.MODE_FUNCTION
        return tools_pb2.ToolChoice(mode=mode, function_name=body.function.name)
    mode = tools_pb2.ToolChoice.Mode.Value(f"MODE_{body.upper()}")
    return tools_pb2.ToolChoice(mode=mode, single_call=single and body == "required")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _prompts(prompt: PromptField) -> Iterator[str | list[int]]:
    """The text or the tokens of each prompt."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        yield prompt
    else:
        for part in prompt:
            yield from _prompts(part)

"""Validates chats, and converts them for the chat template. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from headrace.inference.v1 import inference_pb2, tools_pb2
from headrace_common.errors import VIOLATIONS_MAX
from headrace_common.limits import (
    CHAT_MESSAGES_MAX,
    CHAT_NAME_CHARACTERS_MAX,
    CHAT_ROLES,
    CHAT_TOOLS_MAX,
    ROLE_CHARACTERS_MAX,
    SCHEMA_BYTES_MAX,
    TEMPLATE_KWARGS_BYTES_MAX,
)
from headrace_frontend.request.images import (
    PlainMessages,
    has_image,
    image_violations,
    part_violations,
)
from headrace_frontend.request.json_text import NO_TEXT, JsonRejected, is_text, parse_object
from headrace_frontend.request.schema import enforceable, moved_schema, schema_problem
from headrace_text.codec import RESERVED_NAMES, ChatMessage, ToolCall

_MODE = tools_pb2.ToolChoice.Mode
_MODES = frozenset(_MODE.values())
_FORCING_MODES = (_MODE.MODE_REQUIRED, _MODE.MODE_FUNCTION)
_TOOL_NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{CHAT_NAME_CHARACTERS_MAX}}}")
# The template writes it. It cannot be the text of a control token.
_ROLE = re.compile(rf"[A-Za-z0-9_-]{{1,{ROLE_CHARACTERS_MAX}}}")
_MESSAGES_MAX = 64
_MESSAGE_FIELDS = attrgetter(
    "role", "content", "name", "tool_call_id", "reasoning", "tool_calls", "parts"
)
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


def chat_violations(chat: inference_pb2.Chat, plain: PlainMessages) -> dict[str, str]:
    """Remedies by path of the invalid field. `plain`: see `plain_messages`."""
    if not plain:
        return {"chat.messages": "must hold at least one message"}
    if len(plain) > CHAT_MESSAGES_MAX:
        remedy = f"must hold at most {CHAT_MESSAGES_MAX} messages, not {len(plain)}"
        return {"chat.messages": remedy}
    violations: dict[str, str] = {}
    for index, message in enumerate(plain):
        if message is not None:
            continue
        if len(violations) >= VIOLATIONS_MAX:
            break
        violations.update(_message_violations(f"chat.messages[{index}]", chat.messages[index]))
    if chat.continue_final_message and chat.messages[-1].tool_calls:
        violations["chat.continue_final_message"] = "the final message has tool_calls; leave it out"
    if chat.continue_final_message and has_image(chat.messages[-1]):
        violations["chat.continue_final_message"] = "the final message has an image; leave it out"
    if not violations:
        violations.update(image_violations(chat, plain))
    violations.update(_tool_violations(chat.tools))
    if chat.HasField("tool_choice"):
        violations.update(_tool_choice_violations(chat))
        if not violations and forces_call(chat):
            violations.update(_forced_call_violations(chat))
    if chat.template_kwargs:
        violations.update(_kwargs_violations(chat.template_kwargs))
    return violations


def text_bytes(chat: inference_pb2.Chat) -> int:
    """Bytes of all texts that the chat template may write."""
    return sum(len(text) if text.isascii() else len(text.encode()) for text in _texts(chat))


def plain_text_bytes(request: inference_pb2.GenerateRequest) -> int:
    """Bytes of a prompt's texts that are only encoded. 0 for many messages, of which the template takes more time."""
    messages = plain_messages(request.chat.messages[: _MESSAGES_MAX + 1])
    texts = [message.content for message in messages if message is not None]
    return len("".join(texts or (request.text,)).encode()) if len(texts) <= _MESSAGES_MAX else 0


def plain_messages(messages: Iterable[inference_pb2.ChatMessage]) -> PlainMessages:
    """Those with a known role and text and nothing else, for the chat template, and None for each of the others.

    A field of a message takes far more time to read than one of these.
    """
    return list(map(_plain_message, messages))


def _plain_message(message: inference_pb2.ChatMessage) -> ChatMessage | None:
    role, content, *rare = _MESSAGE_FIELDS(message)
    return ChatMessage(role, content) if role in CHAT_ROLES and not any(rare) else None


def messages_of(chat: inference_pb2.Chat, plain: PlainMessages | None = None) -> list[ChatMessage]:
    """The messages of a valid chat, for the chat template."""
    given = plain_messages(chat.messages) if plain is None else plain
    return [one or _message_of(chat.messages[index]) for index, one in enumerate(given)]


def tools_of(chat: inference_pb2.Chat) -> list[dict[str, Any]]:
    """The tools of a valid chat, as chat templates expect them: OpenAI's objects."""
    return [_tool_object(tool) for tool in chat.tools]


def template_kwargs_of(chat: inference_pb2.Chat) -> dict[str, Any]:
    """The template variables of a valid chat."""
    if not chat.template_kwargs:
        return {}
    return parse_object(chat.template_kwargs, TEMPLATE_KWARGS_BYTES_MAX)


def forces_call(chat: inference_pb2.Chat) -> bool:
    """Whether the answer must call a function."""
    return chat.HasField("tool_choice") and chat.tool_choice.mode in _FORCING_MODES


def forced_call_schema(chat: inference_pb2.Chat) -> str | None:
    """The JSON Schema of an answer that must call a function, as text. None where the model decides."""
    if not forces_call(chat):
        return None
    choice = chat.tool_choice
    schemas = {tool.name: enforceable(_parameters(tool))[0] for tool in chat.tools}
    if choice.mode == _MODE.MODE_FUNCTION:
        return json.dumps(schemas[choice.function_name], ensure_ascii=False)
    definitions: dict[str, Any] = {}
    calls = []
    for number, (name, schema) in enumerate(schemas.items()):
        place = f"#/$defs/tool{number}"
        moved = moved_schema(schema, place)
        if moved != schema:
            # It would be another resource, with references of its own.
            moved.pop("$id", None)
            definitions[f"tool{number}"] = moved
            moved = {"$ref": place}
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": moved}
        required = ["name", "parameters"]
        calls.append({"type": "object", "properties": properties, "required": required})
    answer: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"type": "object", "anyOf": calls},
    }
    if choice.single_call:
        answer["maxItems"] = 1
    if definitions:
        answer["$defs"] = definitions
    return json.dumps(answer, ensure_ascii=False)


def _message_violations(path: str, message: inference_pb2.ChatMessage) -> Iterator[tuple[str, str]]:
    if not _ROLE.fullmatch(message.role):
        yield f"{path}.role", f"must be 1 to {ROLE_CHARACTERS_MAX} letters, digits, _ and -"
    names = {"name": message.name, "tool_call_id": message.tool_call_id}
    for index, call in enumerate(message.tool_calls[:CHAT_TOOLS_MAX]):
        names |= {f"tool_calls[{index}].id": call.id, f"tool_calls[{index}].name": call.name}
        if not call.name:
            yield f"{path}.tool_calls[{index}].name", "must not be empty"
        if not is_text(call.arguments):
            yield f"{path}.tool_calls[{index}].arguments", NO_TEXT
    for field, name in names.items():
        if len(name) > CHAT_NAME_CHARACTERS_MAX:
            yield (
                f"{path}.{field}",
                f"must have at most {CHAT_NAME_CHARACTERS_MAX} characters, not {len(name)}",
            )
    if len(message.tool_calls) > CHAT_TOOLS_MAX:
        yield (
            f"{path}.tool_calls",
            f"must hold at most {CHAT_TOOLS_MAX} calls, not {len(message.tool_calls)}",
        )
    yield from part_violations(path, message)
    if message.role != "assistant":
        for field in ("tool_calls", "reasoning"):
            if getattr(message, field):
                yield f"{path}.{field}", "only a message of role assistant has it; leave it out"
    if message.role != "tool" and message.tool_call_id:
        yield f"{path}.tool_call_id", "only a message of role tool has it; leave it out"


def _tool_violations(tools: Sequence[tools_pb2.Tool]) -> Iterator[tuple[str, str]]:
    if len(tools) > CHAT_TOOLS_MAX:
        yield "chat.tools", f"must hold at most {CHAT_TOOLS_MAX} tools, not {len(tools)}"
        return
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        path = f"chat.tools[{index}]"
        if not _TOOL_NAME.fullmatch(tool.name):
            yield (
                f"{path}.name",
                f'must be 1 to {CHAT_NAME_CHARACTERS_MAX} letters, digits and characters of "_.:/-"',
            )
        elif tool.name in seen:
            yield f"{path}.name", f"{tool.name} is the name of an earlier tool; choose another"
        seen.add(tool.name)
        if tool.parameters:
            try:
                parse_object(tool.parameters, SCHEMA_BYTES_MAX)
            except JsonRejected as error:
                yield f"{path}.parameters", str(error)


def _tool_choice_violations(chat: inference_pb2.Chat) -> Iterator[tuple[str, str]]:
    choice, path = chat.tool_choice, "chat.tool_choice"
    if choice.mode not in _MODES:
        yield f"{path}.mode", "must be one of the named values"
        return
    if choice.mode in _FORCING_MODES and not chat.tools:
        yield f"{path}.mode", "needs tools; set chat.tools or leave it out"
    elif choice.mode == _MODE.MODE_FUNCTION:
        if choice.function_name not in (tool.name for tool in chat.tools):
            yield f"{path}.function_name", "must be the name of one of the tools"
    elif choice.function_name:
        yield f"{path}.function_name", "only MODE_FUNCTION takes it; leave it out"
    if choice.single_call and choice.mode != _MODE.MODE_REQUIRED:
        yield f"{path}.single_call", "only MODE_REQUIRED takes it; leave it out"


def _forced_call_violations(chat: inference_pb2.Chat) -> Iterator[tuple[str, str]]:
    """Of the one schema that tools make together. Elsewhere the model only reads their schemas."""
    choice = chat.tool_choice
    size = len((forced_call_schema(chat) or "").encode())
    if size > SCHEMA_BYTES_MAX:
        yield (
            "chat.tools",
            f"have {size} bytes of JSON Schema together, more than {SCHEMA_BYTES_MAX}; shorten them",
        )
        return
    for index, tool in enumerate(chat.tools):
        if choice.mode == _MODE.MODE_FUNCTION and tool.name != choice.function_name:
            continue
        path = f"chat.tools[{index}].parameters"
        problem = schema_problem(tool.parameters) if tool.parameters else None
        if problem:
            yield path, problem


def _kwargs_violations(text: str) -> dict[str, str]:
    path = "chat.template_kwargs"
    try:
        kwargs = parse_object(text, TEMPLATE_KWARGS_BYTES_MAX)
    except JsonRejected as error:
        return {path: str(error)}
    reserved = sorted(RESERVED_NAMES.intersection(kwargs))
    if reserved:
        return {path: f"{', '.join(reserved)} cannot be set; leave it out"}
    return {}


def _texts(chat: inference_pb2.Chat) -> Iterator[str]:
    yield chat.template_kwargs
    for message in chat.messages:
        yield from (message.content, message.reasoning, message.name)
        yield from (part.text for part in message.parts)
        for call in message.tool_calls:
            yield from (call.name, call.arguments)
    for tool in chat.tools:
        yield from (tool.name, tool.description, tool.parameters)


def _message_of(message: inference_pb2.ChatMessage) -> ChatMessage:
    calls = message.tool_calls
    parts = [None if part.HasField("image") else part.text for part in message.parts]
    return ChatMessage(
        message.role,
        # Parts are lines of one text, as in vLLM.
        "\n".join(part or "" for part in parts) if parts else message.content,
        name=message.name,
        tool_calls=tuple(ToolCall(one.id, one.name, _arguments(one.arguments)) for one in calls),
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
        parts=tuple(parts) if None in parts else (),
    )


def _arguments(text: str) -> dict[str, Any]:
    """No arguments when a model has written something else: the conversation could not continue otherwise."""
    try:
        return parse_object(text, len(text.encode()))
    except JsonRejected:
        return {}


def _parameters(tool: tools_pb2.Tool) -> dict[str, Any]:
    schema = parse_object(tool.parameters, SCHEMA_BYTES_MAX) if tool.parameters else {}
    return schema or dict(_NO_ARGUMENTS)


def _tool_object(tool: tools_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = parse_object(tool.parameters, SCHEMA_BYTES_MAX)
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}

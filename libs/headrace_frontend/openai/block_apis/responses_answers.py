"""Answers of /v1/responses, as OpenAI has them."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeAlias

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_frontend.answers import RESPONSE
from headrace_frontend.openai.answers import AnswerRules
from headrace_frontend.openai.block_apis.blocks import Block, BlockFormat, BlockKind, named_event
from headrace_frontend.openai.errors import AnyError, ErrorForm, error_bytes, error_object
from headrace_frontend.openai.responses import (
    CollectedChoice,
    ResponseHead,
    reasoning_details,
    usage_object,
)
from headrace_frontend.openai.tokens import TokenNames
from headrace_frontend.promises import KEPT_FIELD
from headrace_frontend.running.receipt import RECEIPT_FIELD
from headrace_text.codec import TextCodec

_Usage = dict[str, Any]
_Save: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[None]]
# Of a text that may become the tag of a call.
_HELD_TOKENS_MAX: Final = 64


class ResponsesFormat(BlockFormat):
    """The answers of /v1/responses. `echoed` has the fields of the request that each answer repeats. `namespaced` has
    the namespace and the name of functions, by the name that the model calls, and `customs` the names of custom tools.
    `save` gets the response before the client has all of it.
    """

    renamed = {  # noqa: RUF012
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "messages": "input",
    }

    def __init__(
        self,
        head: ResponseHead,
        rules: AnswerRules,
        echoed: Mapping[str, Any],
        codec: TextCodec,
        namespaced: Mapping[str, tuple[str, str]],
        save: _Save,
        customs: Collection[str],
    ) -> None:
        super().__init__(head, rules)
        self._rules = rules
        self._echoed = echoed
        self._codec = codec
        self._namespaced = namespaced
        self._save = save
        self._whole: dict[str, Any] = {}
        """The response once it has ended."""
        self._customs = customs
        self._names = TokenNames(codec, by_id=False, beside_top=False)
        self._sequence = 0
        self._tokens: list[dict[str, Any]] = []
        """Those that no event has yet, where logprobs are requested."""
        self._sent = CollectedChoice()
        """What was streamed, where the tokens of its reasoning are counted."""

    def first_event(self, index: int) -> bytes:
        response = self.begun("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        if self._rules.reasoning is not None:
            self._sent.add(message, [])
        self._tokens = [*self._tokens[-_HELD_TOKENS_MAX:], *self._names.tokens_of(message)]
        return super().event(index, message)

    def begun(self, status: str) -> dict[str, Any]:
        """The response before its first text."""
        return self._response(status, None)

    def tokens_of(self, message: inference_pb2.GenerateResponse) -> list[dict[str, Any]]:
        return self._names.tokens_of(message)

    def _opened(self, block: Block) -> bytes:
        item = self._item(block, done=False)
        data = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind is not BlockKind.CALL:
            data += self._of(block, "response.content_part.added", part=_part(Block(block.kind, 0)))
        return data

    def _more(self, block: Block, text: str) -> bytes:
        new = self._take_tokens(block, text) if self._tokens else []
        if self._is_custom(block):
            # Its input is within JSON.
            return b""
        if block.kind is BlockKind.CALL:
            return self._event(
                "response.function_call_arguments.delta",
                item_id=self._item_id(block),
                output_index=block.index,
                delta=text,
            )
        return self._of(block, f"{_text_event(block)}.delta", delta=text, **_logprobs(block, new))

    def _closed(self, block: Block) -> bytes:
        place = {"item_id": self._item_id(block), "output_index": block.index}
        if self._is_custom(block):
            kind, text = "response.custom_tool_call_input", _custom_input(block)
            data = self._event(f"{kind}.delta", **place, delta=text)
            data += self._event(f"{kind}.done", **place, input=text)
        elif block.kind is BlockKind.CALL:
            data = self._event(
                "response.function_call_arguments.done",
                **place,
                name=self._function(block)["name"],
                arguments=block.text,
            )
        else:
            logprobs = _logprobs(block, block.logprobs)
            data = self._of(block, f"{_text_event(block)}.done", text=block.text, **logprobs)
            data += self._of(block, "response.content_part.done", part=_part(block))
        item = self._item(block, done=True)
        return data + self._event("response.output_item.done", output_index=block.index, item=item)

    def last_event(self, usages: Sequence[inference_pb2.Usage], prompts: int) -> bytes:
        usage = {**usage_object(usages, prompts), **self._details(self._sent)}
        return self._event(f"response.{self._status}", response=self._ended(usage))

    def whole(self, choices: Sequence[CollectedChoice], prompts: int) -> bytes:
        self._tokens = choices[0].tokens
        self._collect(choices[0])
        usage = {**usage_object([choices[0].usage], prompts), **self._details(choices[0])}
        return json.dumps(self._ended(usage)).encode()

    def _ended(self, usage: _Usage) -> dict[str, Any]:
        self._whole = self._response(self._status, usage)
        return self._whole

    async def stored(self) -> None:
        await self._save(self._whole)

    def _take_tokens(self, block: Block, text: str) -> list[dict[str, Any]]:
        """Those of more text of a block. Those before them are of no block. All, where some are parts of characters."""
        tokens = self._tokens
        ends = [*accumulate(len(one["token"]) for one in tokens)]
        start = "".join(one["token"] for one in tokens).find(text)
        first, last = bisect_right(ends, start), bisect_left(ends, start + len(text)) + 1
        if start < 0:
            first, last = 0, len(tokens) if block.kind is BlockKind.TEXT else 0
        new, self._tokens = tokens[first:last], tokens[last:]
        if block.kind is BlockKind.TEXT:
            block.logprobs += new
        return new

    def _details(self, choice: CollectedChoice) -> dict[str, Any]:
        return reasoning_details(self._codec, self._rules, [choice])

    @property
    def _status(self) -> str:
        cut = self._last.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
        return "incomplete" if cut else "completed"

    def _response(self, status: str, usage: _Usage | None) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self._head.model,
            "output": [self._item(block, done=True) for block in self.blocks],
            "usage": None if usage is None else _usage(usage),
            **self._echoed,
        }

    def _item_id(self, block: Block) -> str:
        prefix = {BlockKind.CALL: "fc", BlockKind.REASONING: "rs"}.get(block.kind, "msg")
        return f"{prefix}_{self._head.id.removeprefix(RESPONSE)}_{block.index}"

    def _item(self, block: Block, *, done: bool) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block)}
        content = [_part(block)] if done else []
        if self._is_custom(block):
            item |= {"type": "custom_tool_call", "call_id": block.call_id, "name": block.name}
            item |= {"input": _custom_input(block) if done else ""}
        elif block.kind is BlockKind.CALL:
            arguments = block.text if done else ""
            item |= {"type": "function_call", "call_id": block.call_id}
            item |= self._function(block) | {"arguments": arguments}
        elif block.kind is BlockKind.REASONING:
            item |= {"type": "reasoning", "summary": [], "content": content}
        else:
            item |= {"type": "message", "role": "assistant", "content": content}
        cut = self.blocks and block is self.blocks[-1]
        ended = self._status if cut else "completed"
        return item | {"status": ended if done else "in_progress"}

    def _is_custom(self, block: Block) -> bool:
        return block.kind is BlockKind.CALL and block.name in self._customs

    def failure_event(self, error: AnyError) -> bytes:
        found = error_object(error)["error"]
        shown = {"code": found["code"], "message": found["message"]}
        response = {**self._response("failed", None), "error": shown}
        return self._event("response.failed", response=response)

    def _function(self, block: Block) -> dict[str, str]:
        """The name of a call's function, and its namespace if it has one."""
        if block.name not in self._namespaced:
            return {"name": block.name}
        namespace, name = self._namespaced[block.name]
        return {"name": name, "namespace": namespace}

    def _of(self, block: Block, kind: str, **fields: Any) -> bytes:
        """An event about a block's only part."""
        place = {"item_id": self._item_id(block), "output_index": block.index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return named_event({"type": kind, "sequence_number": self._sequence - 1, **fields})


def _error_event(error: AnyError) -> bytes:
    found = error_object(error)["error"]
    fields = {name: found[name] for name in ("code", "message", "param")}
    return named_event({"type": "error", **fields})


RESPONSES_ERRORS: Final = ErrorForm(error_bytes, _error_event)


def _text_event(block: Block) -> str:
    return f"response.{'reasoning' if block.kind is BlockKind.REASONING else 'output'}_text"


def _custom_input(block: Block) -> str:
    """The text that is the input. All of what the model wrote, if that is no JSON with an input."""
    try:
        found = json.loads(block.text)["input"]
    except (ValueError, LookupError, TypeError):
        return block.text
    return found if isinstance(found, str) else block.text


def _logprobs(block: Block, tokens: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"logprobs": tokens} if block.kind is BlockKind.TEXT else {}


def _part(block: Block) -> dict[str, Any]:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    part = {"type": "output_text", "text": block.text, "annotations": []}
    return part | {"logprobs": block.logprobs}


def _usage(usage: _Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        **{name: value for name, value in usage.items() if name in (KEPT_FIELD, RECEIPT_FIELD)},
    }

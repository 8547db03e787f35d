"""An answer as blocks, one after the other: reasoning, text and tool calls. Each API has its own events for them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from headrace.inference.v1 import inference_pb2
from headrace_frontend.openai.answers import AnswerRules, ChatAnswer
from headrace_frontend.openai.responses import AnswerFormat, CollectedChoice, ResponseHead


class BlockKind(Enum):
    """What a block contains."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A block. `call_id` and `name` are those of a call, and its text is the arguments as JSON."""

    kind: BlockKind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of the tokens of a text, where they are requested."""

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.pieces)


class BlockFormat(AnswerFormat):
    """Formats one answer as blocks."""

    def __init__(self, head: ResponseHead, rules: AnswerRules) -> None:
        self._head = head
        self._answer = ChatAnswer(rules)
        self._divides = rules.divides
        self._last = inference_pb2.GenerateResponse()
        self.blocks: list[Block] = []
        """The last one is open until the answer ends."""

    @abstractmethod
    def _opened(self, block: Block) -> bytes:
        """The events of a block that has no text yet."""

    @abstractmethod
    def _more(self, block: Block, text: str) -> bytes:
        """The event of more text."""

    @abstractmethod
    def _closed(self, block: Block) -> bytes:
        """The events of a block that is complete."""

    def event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        last = bool(message.finish_reason)
        data = b"".join(self._add(self._answer.delta(message.text, last=last)))
        if last:
            self._last = message
            data += b"".join(self._close())
        return data

    def text_event(self, index: int, text: str) -> bytes | None:
        if self._divides or not self.blocks or not text:
            return None
        block = self.blocks[-1]
        block.pieces.append(text)
        return self._more(block, text)

    def _collect(self, choice: CollectedChoice) -> None:
        """Takes a whole answer."""
        self._last = inference_pb2.GenerateResponse(
            finish_reason=choice.reason, stop_text=choice.stop_text
        )
        for _ in self._add(self._answer.whole(choice.text)):
            pass

    def _add(self, delta: Mapping[str, Any]) -> Iterator[bytes]:
        calls = list(delta.get("tool_calls", ()))
        if calls and "id" not in calls[0]:
            # The rest of a call, which is before a text after it.
            yield self._extend(calls.pop(0)["function"]["arguments"])
        for name, kind in (("reasoning_content", BlockKind.REASONING), ("content", BlockKind.TEXT)):
            if text := delta.get(name):
                if not self.blocks or self.blocks[-1].kind is not kind:
                    yield from self._open(Block(kind, len(self.blocks)))
                yield self._extend(text)
        for call in calls:
            function = call["function"]
            block = Block(BlockKind.CALL, len(self.blocks), call["id"], function["name"])
            yield from self._open(block)
            if function["arguments"]:
                yield self._extend(function["arguments"])

    def _open(self, block: Block) -> Iterator[bytes]:
        yield from self._close()
        self.blocks.append(block)
        yield self._opened(block)

    def _extend(self, text: str) -> bytes:
        block = self.blocks[-1]
        block.pieces.append(text)
        return self._more(block, text)

    def _close(self) -> Iterator[bytes]:
        if self.blocks:
            yield self._closed(self.blocks[-1])


def named_event(fields: Mapping[str, Any]) -> bytes:
    """A server-sent event with the name in the object's `type`."""
    return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n".encode()

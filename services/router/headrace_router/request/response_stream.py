"""The answer on its way to the client: text made from tokens, stop texts found, tokens coalesced.

A producer adds tokens, a consumer takes messages. What arrives while the consumer is writing, or within the stream's
least time between two messages, shares its next message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import first_token_pb2, inference_pb2, sampling_pb2
from headrace_common.process.pacing import FlushPace, LoopLoad
from headrace_router.request.validation import PreparedRequest
from headrace_text.detokenizer import TextStream
from headrace_text.stop_strings import StopScanner

PENDING_TOKENS_MAX = 1_024


@dataclass(slots=True)
class _Pending:
    """What the client has not been sent yet. Its tokens become text when they are sent, but for stop texts' sake."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[sampling_pb2.TokenLogprobs] = field(default_factory=list)
    with_text: bool = False


class ResponseStream:
    """One request's answer.

    It is one answer whoever generates it: an attempt goes on after the tokens that others have added, and after those
    that the client brought along.
    """

    def __init__(
        self, request: PreparedRequest, trace_id: str, load: LoopLoad | None = None
    ) -> None:
        self._request = request
        self._trace_id = trace_id
        self._stream = TextStream(request.codec.decode, request.token_ids)
        self._stops = StopScanner(request.stop_texts)
        self._stop_token_ids = frozenset(request.stop_token_ids)
        self._pending = _Pending()
        self._last: inference_pb2.GenerateResponse | None = None
        self._failure: Exception | None = None
        self._ended = False
        self.finish_reason: sampling_pb2.FinishReason.ValueType = (
            sampling_pb2.FINISH_REASON_UNSPECIFIED
        )
        self._first_message = True
        self._generated = list(request.generated)
        self.first_token_by = first_token_pb2.FIRST_TOKEN_POLICY_DECODE
        """Who made the first token."""
        self._ready = asyncio.Event()
        self._pace = FlushPace(load or LoopLoad())
        self._drained = asyncio.Event()
        self.first_token_unix_ns = 0
        self.second_token_unix_ns = 0
        """When what came after the first tokens came; these are several where decode makes them fast."""
        self.last_token_unix_ns = 0
        self._take_up()

    @property
    def started(self) -> bool:
        """Whether a token has come."""
        return len(self._generated) > len(self._request.generated)

    @property
    def generated(self) -> tuple[int, ...]:
        """All its tokens so far, which the next attempt goes on after."""
        return tuple(self._generated)

    @property
    def completion_tokens(self) -> int:
        """How many tokens it has so far."""
        return len(self._generated)

    @property
    def ended_by(self) -> sampling_pb2.FinishReason.ValueType:
        """Why no token can follow; unspecified while one can."""
        if self.stopped:
            return sampling_pb2.FINISH_REASON_STOP
        return ended_by(self._request, self._generated)

    async def add_first(
        self, tokens: decode_pb2.Tokens, maker: first_token_pb2.FirstTokenPolicy.ValueType
    ) -> None:
        """Takes the first token, which needed no KV cache on the decode worker, and perhaps more behind it."""
        self.first_token_by = maker
        await self.add(tokens)

    @property
    def stopped(self) -> bool:
        """Whether a stop text is complete; tokens added after that are ignored."""
        return self._stops.stopped

    async def add(self, tokens: decode_pb2.Tokens) -> None:
        """Takes tokens from the decode worker; waits while the client is too far behind."""
        if self.stopped or not tokens.token_ids:
            return
        now_unix_ns = time.time_ns()
        if not self.started:
            self.first_token_unix_ns = now_unix_ns
        elif not self.second_token_unix_ns:
            self.second_token_unix_ns = now_unix_ns
        self.last_token_unix_ns = now_unix_ns
        if self._request.stop_texts:
            self._add_until_stop(tokens)
        else:
            self._generated.extend(tokens.token_ids)
            self._pending.token_ids.extend(tokens.token_ids)
            self._pending.logprobs.extend(tokens.logprobs)
        self._ready.set()
        while len(self._pending.token_ids) > PENDING_TOKENS_MAX:
            self._drained.clear()
            await self._drained.wait()

    def _add_until_stop(self, tokens: decode_pb2.Tokens) -> None:
        """Which token completes a stop text is only seen token by token."""
        for index, token_id in enumerate(tokens.token_ids):
            if self.stopped:
                break
            self._generated.append(token_id)
            self._pending.token_ids.append(token_id)
            self._pending.logprobs.extend(tokens.logprobs[index : index + 1])
            # A stop token ends the answer and is no part of its text.
            if token_id not in self._stop_token_ids:
                self._pending.text.append(self._stops.push(self._stream.push(token_id)))

    def _take_up(self) -> None:
        """Brings text and stop texts to where the client is with what was generated elsewhere."""
        spoken = [token for token in self._generated if token not in self._stop_token_ids]
        if self._request.stop_texts:
            for token_id in spoken:
                self._stops.push(self._stream.push(token_id))
        else:
            self._stream.push_all(spoken)

    def finish(
        self,
        reason: sampling_pb2.FinishReason.ValueType,
        usage: inference_pb2.Usage,
        timing: inference_pb2.Timing,
    ) -> None:
        """Ends the answer: the next message taken is the last."""
        self._make_text(self._pending)
        if not self.stopped:
            self._pending.text.append(self._stops.push(self._stream.finish()))
        self._pending.text.append(self._stops.finish())
        # A stop text can come to light in the last characters only.
        self.finish_reason = sampling_pb2.FINISH_REASON_STOP if self.stopped else reason
        self._last = inference_pb2.GenerateResponse(
            finish_reason=self.finish_reason, usage=usage, timing=timing
        )
        self._ended = True
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error, after what has come is taken."""
        self._failure = error
        self._ended = True
        self._ready.set()

    async def take(self) -> inference_pb2.GenerateResponse | None:
        """The next message, with all that has come; None after the last.

        Raises what the answer failed with.
        """
        while True:
            await self._ready.wait()
            if self._pending.token_ids or self._last is not None:
                rest_s = self._pace.batch_s(time.monotonic())
                if rest_s > 0:
                    await asyncio.sleep(rest_s)
                self._pace.record_flush(time.monotonic())
                return self._next_message()
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return None
            self._ready.clear()

    def _make_text(self, pending: _Pending) -> None:
        """Makes the text of all that has come at once, where nobody has looked at it yet."""
        if self._request.stop_texts or pending.with_text:
            return
        pending.with_text = True
        spoken = [t for t in pending.token_ids if t not in self._stop_token_ids]
        pending.text.append(self._stream.push_all(spoken))

    def _next_message(self) -> inference_pb2.GenerateResponse:
        response = self._last or inference_pb2.GenerateResponse()
        self._last = None
        pending, self._pending = self._pending, _Pending()
        self._make_text(pending)
        if not self._ended:
            self._ready.clear()
        self._drained.set()
        response.request_id = self._request.request_id
        response.text = "".join(pending.text)
        response.token_ids.extend(pending.token_ids)
        response.logprobs.extend(pending.logprobs)
        if self._first_message:
            response.trace_id = self._trace_id
            self._first_message = False
        return response


def ended_by(
    request: PreparedRequest, generated: Sequence[int]
) -> sampling_pb2.FinishReason.ValueType:
    """Why no token can follow these, stop texts aside; unspecified while one can."""
    if generated and generated[-1] in request.stop_token_ids:
        return sampling_pb2.FINISH_REASON_STOP
    if len(generated) >= request.sampling.max_tokens:
        return sampling_pb2.FINISH_REASON_LENGTH
    return sampling_pb2.FINISH_REASON_UNSPECIFIED

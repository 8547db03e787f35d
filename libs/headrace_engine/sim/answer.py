"""Validates requests, and yields the events of an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from headrace_common.errors import InvalidRequest
from headrace_engine.interface import (
    DecodeEnded,
    DecodeEvent,
    DecodeEvents,
    DecodeWork,
    PrefillWork,
    Sampling,
)
from headrace_engine.sim.events import DecodeEventQueue
from headrace_engine.sim.model.sampling import SUPPORTED_FORMS
from headrace_engine.sim.sequence import Sequence


def check_prefill(work: PrefillWork, max_model_len: int) -> None:
    """Raises InvalidRequest naming every wrong field."""
    target, count = work.target, len(work.token_ids)
    violations: dict[str, str] = {}
    if not 0 < count < max_model_len:
        violations["token_ids"] = f"give 1 to {max_model_len - 1} tokens"
    if not 0 <= target.start_token < target.end_token == count:
        violations["target.end_token"] = "it is the number of tokens, above start_token"
    violations |= _constraint_violations(work.sampling)
    if violations:
        raise InvalidRequest(violations)


def check_decode(work: DecodeWork, max_model_len: int) -> None:
    """Raises InvalidRequest naming the wrong field."""
    if not 0 < len(work.token_ids) < max_model_len:
        raise InvalidRequest({"token_ids": f"give 1 to {max_model_len - 1} tokens"})
    if work.sampling.max_tokens <= work.generated_tokens:
        least = work.generated_tokens + 1
        raise InvalidRequest({"sampling.max_tokens": f"take {least} or more"})
    violations = _constraint_violations(work.sampling)
    if violations:
        raise InvalidRequest(violations)


def _constraint_violations(sampling: Sampling | None) -> dict[str, str]:
    outputs = sampling.structured_outputs if sampling is not None else None
    if outputs is None or outputs.kind in SUPPORTED_FORMS:
        return {}
    return {
        f"sampling.structured_outputs.{outputs.kind}": f"the simulated engine supports {', '.join(SUPPORTED_FORMS)}; "
        "use one of these, or the engine vllm"
    }


class SimAnswer(DecodeEvents):
    """Starts its request at the first read, and ends it after the last event, with an error, or by `abort`."""

    def __init__(self, start: Callable[[], Sequence], end: Callable[[Sequence], None]) -> None:
        """`start` submits the request and raises as Engine.decode does. `end` takes its caller from it."""
        self._start = start
        self._end = end
        self._sequence: Sequence | None = None
        self._unread: deque[DecodeEvent] = deque()
        self._ended = False

    def follow(self, on_events: Callable[[], None]) -> None:
        self._events.follow(on_events)

    def take(self) -> list[DecodeEvent]:
        if self._ended:
            return []
        try:
            events = self._events.take()
        except Exception:
            self.abort()
            raise
        if events and isinstance(events[-1], DecodeEnded):
            self.abort()
        return events

    async def __anext__(self) -> DecodeEvent:
        while not self._unread:
            if self._ended:
                raise StopAsyncIteration
            try:
                await self._events.wait()
            except BaseException:
                # As a generator that is cancelled while it waits.
                self.abort()
                raise
            self._unread.extend(self.take())
        return self._unread.popleft()

    def abort(self) -> None:
        self._ended = True
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            self._end(sequence)

    @property
    def _events(self) -> DecodeEventQueue:
        if self._sequence is None:
            self._sequence = self._start()
        assert self._sequence.generation is not None
        return self._sequence.generation.events

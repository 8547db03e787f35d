"""Several answers to one prompt, which share its KV cache.

The first answer starts alone. The others start when the KV cache of the prompt is on a decode worker, and prefer that
worker.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.priority import Priority
from headrace_common.deadlines import Deadline
from headrace_common.latency.clocks import ClockPair
from headrace_common.limits import ANSWERS_MAX
from headrace_frontend.request.response_stream import Outlet, ResponseStream, ResponseWriter
from headrace_frontend.request.sampling import SEED_MAX
from headrace_frontend.request.validation import REQUEST_ID_CHARACTERS_MAX, PreparedRequest

# Shorter prompts fill few blocks or none, and computing them takes less time than waiting for the first answer.
_SHARED_TOKENS_MIN = 64

# The id of a response in a body has one of these before the id of the request.
ID_PREFIXES: Final = ("cmpl-", "chatcmpl-", "msg_", "resp_")
COMPLETION, CHAT, MESSAGE, RESPONSE = ID_PREFIXES


@dataclass(slots=True)
class Answer:
    """One answer to run, for `request` of a tenant that arrived then. `write` and `outlet`: see ResponseStream.write.

    `group` gets the first of several, as a valid request and as an empty response. `prepared` is the valid request, if
    it is known. `on_lowered`: see RequestRunner.run.
    """

    request: inference_pb2.GenerateRequest
    request_id: str
    tenant: str
    priority: Priority
    deadline: Deadline
    arrival: ClockPair
    write: ResponseWriter
    outlet: Outlet | None = None
    on_lowered: Callable[[int], None] | None = None
    group: AnswerGroup | None = None
    prepared: PreparedRequest | None = None


def answer_count(request: inference_pb2.GenerateRequest) -> int:
    """Answers to generate. 1 for a count that is invalid: the validation of that one rejects it."""
    count = max(1, request.n, request.best_of)
    return count if count <= ANSWERS_MAX else 1


class AnswerGroup:
    """The answers to one prompt. `write` sends a message to the client."""

    def __init__(self, request: inference_pb2.GenerateRequest, write: ResponseWriter) -> None:
        self.count = answer_count(request)
        self._kept = max(1, request.n)
        self._write = write
        self._ranks = request.best_of > self._kept
        self._hides_logprobs = self._ranks and not request.sampling.HasField("logprobs")
        self._writing = asyncio.Lock()
        self._held: list[list[inference_pb2.GenerateResponse]] = [[] for _ in range(self.count)]
        self._first: PreparedRequest | None = None
        self._response: ResponseStream | None = None
        self._shared = asyncio.Event()

    def first_prepared(self, prepared: PreparedRequest) -> PreparedRequest:
        """The request of the first answer, which makes those of the others."""
        self._first = self._with_logprobs(prepared)
        if len(prepared.token_ids) < _SHARED_TOKENS_MIN:
            self._shared.set()
        return self._first

    def first_started(self, response: ResponseStream) -> None:
        """The first answer's response, which shows when the KV cache has arrived."""
        self._response = response

    def first_ended(self) -> None:
        """The first answer has ended."""
        self._shared.set()

    async def prepared(self, number: int) -> PreparedRequest:
        """The request of answer `number`, once the KV cache of its prompt can be shared."""
        await self._shared.wait()
        assert self._first is not None
        sampling = self._first.sampling
        if sampling.HasField("seed"):
            sampling = deepcopy(sampling)
            sampling.seed = (sampling.seed + number) % (SEED_MAX + 1)
        return replace(
            self._first,
            request_id=f"{self._first.request_id}-{number}",
            sampling=sampling,
            cached_on=self._response.decode_worker if self._response is not None else None,
        )

    def writer(self, number: int) -> ResponseWriter:
        """Receives the messages of answer `number`."""

        async def write(message: inference_pb2.GenerateResponse) -> None:
            if self._response is not None and self._response.kv_is_on_decode:
                self._shared.set()
            if self._first is not None:
                message.request_id = self._first.request_id
            message.choice = number
            if self._ranks:
                self._held[number].append(message)
                return
            async with self._writing:
                await self._write(message)

        return write

    async def finish(self) -> None:
        """Sends the best answers, if they are ranked. All have ended."""
        if not self._ranks:
            return
        ranked = sorted(self._held, key=mean_logprob, reverse=True)
        for number, messages in enumerate(ranked[: self._kept]):
            for message in messages:
                message.choice = number
                if self._hides_logprobs:
                    message.ClearField("logprobs")
                await self._write(message)

    def _with_logprobs(self, prepared: PreparedRequest) -> PreparedRequest:
        if not self._hides_logprobs:
            return prepared
        sampling = deepcopy(prepared.sampling)
        sampling.logprobs = 0
        return replace(prepared, sampling=sampling)


async def run_answers(answer: Answer, run: Callable[[Answer], Awaitable[None]]) -> None:
    """Runs the several answers to a request with `run`, in place of `answer`. The first error ends all."""
    group = AnswerGroup(answer.request, answer.write)

    async def run_first() -> None:
        await run(replace(answer, write=group.writer(0), outlet=None, group=group))
        group.first_ended()

    async def run_other(number: int) -> None:
        prepared, write = await group.prepared(number), group.writer(number)
        request_id = prepared.request_id
        await run(
            replace(answer, request_id=request_id, write=write, outlet=None, prepared=prepared)
        )

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run_first())
            for number in range(1, group.count):
                tasks.create_task(run_other(number))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    await group.finish()


def request_id_of(request: inference_pb2.GenerateRequest) -> str:
    """The client's id, cut to the size limit: a rejected request can be found by it, too. Else a new one."""
    return request.request_id[:REQUEST_ID_CHARACTERS_MAX] or f"r{secrets.token_hex(12)}"


def possible_ids(name: str) -> list[str]:
    """The ids of a request that a name may be, the likeliest first: its own id, or that of the response to it."""
    return [name, *(name.removeprefix(one) for one in ID_PREFIXES if name.startswith(one))]


def mean_logprob(messages: list[inference_pb2.GenerateResponse]) -> float:
    """Of the tokens in the messages of one answer."""
    logprobs = [entry.logprob for message in messages for entry in message.logprobs]
    return math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf

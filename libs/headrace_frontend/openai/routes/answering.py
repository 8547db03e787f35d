"""Runs the requests of one HTTP request, and sends their answers as a stream or as one object."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, TypeAlias

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.deadlines import Deadline
from headrace_frontend.answers import Outlets
from headrace_frontend.openai.block_apis.anthropic_answers import MessagesFormat
from headrace_frontend.openai.completion_format import CompletionFormat
from headrace_frontend.openai.exchange import HttpExchange
from headrace_frontend.openai.parts import OpenAiParts
from headrace_frontend.openai.requests import GenerationBody
from headrace_frontend.openai.responses import AnswerFormat, CollectedChoice, ResponseFormat
from headrace_frontend.openai.routes.intake import Intake, openai_names
from headrace_frontend.promises import KEEP_HEADER, ask_to_keep

_AnswerField: TypeAlias = Literal["text", "token_ids", "logprobs", "stop_text"]
# Of one with logprobs in a response, about.
_PROMPT_TOKEN_BYTES: Final = 128
_ANSWER_FIELDS: Final[Sequence[_AnswerField]] = ("text", "token_ids", "logprobs", "stop_text")

_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Proxies such as nginx would collect events.
    "x-accel-buffering": "no",
}


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request as requests of the InferenceService, one for each prompt."""

    tenant: str
    body: GenerationBody
    requests: Sequence[inference_pb2.GenerateRequest]
    deadline: Deadline
    format: AnswerFormat
    generates: bool = True
    """Whether the choices have more than the prompt."""

    @property
    def choices(self) -> int:
        """The number of choices of all prompts."""
        return sum(request.n for request in self.requests)


class Answering:
    """Answers generations."""

    def __init__(self, parts: OpenAiParts, intake: Intake) -> None:
        self._parts = parts
        self._intake = intake

    async def answer(self, exchange: HttpExchange, generation: Generation) -> None:
        """Sends the answer. Raises InvalidRequest with OpenAI's names of the fields."""
        form = generation.format
        includes = generation.body.includes
        respond = self._stream if generation.body.stream else self._collect
        with openai_names(
            chat=not isinstance(form, CompletionFormat),
            formatted=generation.body.formatted,
            echoed=not includes.prompt_logprobs,
        ):
            ask_to_keep(exchange.headers.get(KEEP_HEADER), generation.requests)
            if (includes.prompt or includes.prompt_text) and isinstance(form, ResponseFormat):
                for request in generation.requests:
                    tokens, text = await self._prompt_of(generation, request)
                    form.add_prompt(tokens, request.n, text)
            if isinstance(form, MessagesFormat):
                async with self._intake.admitted(generation.tenant):
                    await self._parts.preparer.fit(generation.requests[0], generation.tenant)
            await exchange.run_while_connected(respond(exchange, generation))

    async def _prompt_of(
        self, generation: Generation, request: inference_pb2.GenerateRequest
    ) -> tuple[Sequence[int], str]:
        """The tokens of a prompt, where the response needs them before its first event, and its text if it has that."""
        preparer, tenant = self._parts.preparer, generation.tenant
        async with self._intake.admitted(tenant, generation.deadline):
            prepared = await preparer.tokenize(request, tenant)
            text = request.text
            if generation.body.includes.prompt_text and not text:
                decode = partial(
                    prepared.codec.decode, prepared.token_ids, skip_special_tokens=False
                )
                text = await preparer.run(tenant, 4 * len(prepared.token_ids), decode)
        return prepared.token_ids, text

    async def _stream(self, exchange: HttpExchange, generation: Generation) -> None:
        """Sends an event for each message of each choice."""
        prompts = len(generation.requests)
        events = _EventStream(
            exchange, generation.format, choices=generation.choices, prompts=prompts
        )
        await self._run_all(generation, events.write, events)
        await events.finish()

    async def _collect(self, exchange: HttpExchange, generation: Generation) -> None:
        """Sends one object at the end."""
        form = generation.format
        choices = [CollectedChoice() for _ in range(generation.choices)]

        async def write(index: int, message: inference_pb2.GenerateResponse) -> None:
            choices[index].add(message, form.tokens_of(message))

        await self._run_all(generation, write)
        prompt_tokens = sum(len(choice.prompt_token_ids) for choice in choices)
        body = await self._parts.preparer.run(
            generation.tenant,
            _PROMPT_TOKEN_BYTES * prompt_tokens,
            partial(form.whole, choices, len(generation.requests)),
        )
        await exchange.respond(200, body)

    async def _run_all(
        self,
        generation: Generation,
        write: Callable[[int, inference_pb2.GenerateResponse], Awaitable[None]],
        events: _EventStream | None = None,
    ) -> None:
        """Runs the requests of all prompts. The first error ends them all. `events` may send messages at once."""

        async def run(first_index: int, request: inference_pb2.GenerateRequest) -> None:
            async def write_choice(message: inference_pb2.GenerateResponse) -> None:
                if not generation.generates:
                    _leave_out_answer(message)
                await write(first_index + message.choice, message)

            outlets: Outlets | None = None
            if events is not None and generation.generates:
                outlets = Outlets(
                    partial(events.write_text, first_index), partial(events.write_now, first_index)
                )
            await self._parts.runner.run(
                request, generation.tenant, generation.deadline, write_choice, outlets
            )

        if len(generation.requests) == 1:
            await run(0, generation.requests[0])
            return
        first_index = 0
        try:
            async with asyncio.TaskGroup() as group:
                for request in generation.requests:
                    group.create_task(run(first_index, request))
                    first_index += request.n
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


class _EventStream:
    """Sends an event for each message of each choice. `prompts` share the choices evenly."""

    def __init__(
        self, exchange: HttpExchange, form: AnswerFormat, *, choices: int, prompts: int
    ) -> None:
        self._exchange = exchange
        self._form = form
        self._prompts = prompts
        self._usages = [inference_pb2.Usage() for _ in range(choices)]
        self._begun: set[int] = set()
        """The choices with an event."""
        self._ending = b""

    async def write(self, index: int, message: inference_pb2.GenerateResponse) -> None:
        """Sends a message of choice `index`. Waits while the client does not read."""
        data = self._event(index, message)
        if message.finish_reason:
            self._usages[index] = message.usage
            if len(self._usages) == 1:
                # One write for all that is left.
                self._ending = data
                return
        if not self._exchange.started:
            await self._exchange.start(200, _STREAM_HEADERS)
        if data:
            await self._exchange.write(data)

    def write_now(self, index: int, message: inference_pb2.GenerateResponse) -> bool:
        """Sends a message that is not the last one of its choice. See MessageOutlet."""
        exchange = self._exchange
        if not exchange.writable:
            return False
        data = self._event(index, message)
        if exchange.started:
            return not data or exchange.write_now(data)
        return exchange.start_now(_STREAM_HEADERS, data)

    def write_text(self, index: int, text: str) -> bool:
        """Sends text after the first message of choice `index`. See TextOutlet."""
        data = self._form.text_event(index, text)
        return data is not None and self._exchange.write_now(data)

    async def finish(self) -> None:
        """Sends what is left, once all choices have ended."""
        exchange = self._exchange
        data = self._ending + self._form.last_event(self._usages, self._prompts)
        if not exchange.started:
            await exchange.start(200, _STREAM_HEADERS)
        await exchange.finish(data)

    def _event(self, index: int, message: inference_pb2.GenerateResponse) -> bytes:
        if index in self._begun:
            return self._form.event(index, message)
        self._begun.add(index)
        return self._form.first_event(index) + self._form.event(index, message)


def _leave_out_answer(message: inference_pb2.GenerateResponse) -> None:
    """Leaves nothing but the prompt in a message."""
    for name in _ANSWER_FIELDS:
        message.ClearField(name)
    if message.finish_reason:
        message.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
        message.usage.completion_tokens = 0

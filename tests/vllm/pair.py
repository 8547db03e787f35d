"""A prefill and a decode engine, connected as the services connect them."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import grpc.aio

from headrace.kv.v1 import handoff_pb2_grpc
from headrace_common.deadlines import Deadline
from headrace_common.errors import StaleIncarnation
from headrace_engine.config import EngineConfig
from headrace_engine.interface import (
    Arrived,
    DecodeEnded,
    DecodeEvent,
    DecodeTokens,
    DecodeWork,
    FirstHiddenState,
    FirstToken,
    PrefillOutcome,
    PrefillWork,
    Released,
    Sampling,
    TokenLogprobs,
    TransferEvent,
)
from headrace_engine.vllm.engine import VllmEngine
from headrace_engine.vllm.link.messages import EngineLoad
from headrace_kv.hidden_state import HiddenFormat
from headrace_kv.layout import KvDescriptor, WorkerRef
from headrace_kv.messages import Reservation, TransferTarget
from headrace_kv.receive.receiver import IncomingTransfer, Receiver, TransferSummary
from headrace_kv.receive.service import HandoffServicer
from headrace_kv.receive.verification import DigestChecks
from headrace_kv.tickets import NoTickets
from tests.decoding import decoded
from tests.waiting import until

MODEL = Path(os.environ.get("HEADRACE_TEST_MODEL", "models/tiny-llama-deep"))
ENGINE_ARGS = os.environ.get("HEADRACE_TEST_ENGINE_ARGS", "")
"""Of engines for which a test gives none. With --async-scheduling, the tests run in that mode."""
STEPS_AHEAD = "--async-scheduling"
DRAFTS = (
    "--speculative-config "
    '\'{"method": "draft_model", "model": "models/tiny-llama", "num_speculative_tokens": 3}\''
)
BLOCK_TOKENS = 32
CHUNK_TOKENS = 512
TIMEOUT_S = 60.0
# vLLM's ranks spin while they wait. On two cores, four of them block other threads for seconds.
LEASE_TTL_S = 20.0
GREEDY = Sampling(temperature=0.0, max_tokens=16)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens that the vocabulary of any model has."""
    numbers = random.Random(f"{length}/{seed}")
    return [numbers.randrange(3, 500) for _ in range(length)]


@dataclass(slots=True)
class Answer:
    """The events of one request."""

    token_ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """The tokens of each step."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reservation: Reservation | None = None
    end: DecodeEnded | None = None
    summary: TransferSummary | None = None
    prefill: PrefillOutcome | None = None
    arrived_ns: int = 0
    step_start_ns: int = 0

    def take(self, event: DecodeEvent) -> None:
        """Adds an event."""
        if isinstance(event, DecodeTokens):
            self.token_ids.extend(event.token_ids)
            self.steps.append(len(event.token_ids))
            self.logprobs.extend(event.logprobs)
            self.step_start_ns = self.step_start_ns or event.step_start_ns
        elif isinstance(event, DecodeEnded):
            self.end = event
        elif isinstance(event, Reservation):
            self.reservation = event


def engine_config(role: str, **changes: object) -> EngineConfig:
    """A small engine in float32, on loopback."""
    values: dict[str, object] = {
        "engine": "vllm",
        "model": str(MODEL),
        "role": role,
        "ref": WorkerRef(role, f"{role[0]}{time.time_ns():015x}"[:16]),
        "dtype": "float32",
        "num_gpu_blocks_override": 128,
        "block_size": BLOCK_TOKENS,
        "max_num_seqs": 8,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "engine_args": ENGINE_ARGS,
    }
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


class Pair:
    """Both engines, the receiver, and the handoff service between them."""

    def __init__(self, prefill: VllmEngine, decode: VllmEngine, refs: dict[str, WorkerRef]) -> None:
        self.prefill = prefill
        self.decode = decode
        self.refs = refs
        self.receiver: Receiver
        self.checks: DigestChecks | None = None
        self.endpoint = ""
        self.released: list[str] = []
        self._transfer_ids: list[str] = []

    def new_transfer_id(self) -> str:
        """A new id."""
        self._transfer_ids.append(f"x{time.time_ns():020d}{len(self._transfer_ids):012d}")
        return self._transfer_ids[-1]

    def release(self, transfer_id: str) -> None:
        """The receiver's callback, as in the decode service."""
        self.released.append(transfer_id)
        self.decode.transfer_event(Released(transfer_id))

    async def release_all(self) -> None:
        """Ends what a failed test has left, so that later tests find unused engines."""
        for transfer_id in self._transfer_ids:
            self.receiver.cancel(transfer_id, "CANCELLED", "its test has failed")
            self.decode.transfer_event(Released(transfer_id))
        await self.reset()

    async def reset(self) -> None:
        """Empties both prefix caches."""
        for engine in (self.prefill, self.decode):
            await reset(engine)

    async def left_blocks(self) -> list[int]:
        """The blocks in use of each engine, once there are none."""
        engines = (self.prefill, self.decode)
        await until(lambda: not any(one.load.used_blocks for one in engines), TIMEOUT_S)
        return [one.load.used_blocks for one in engines]

    def target(self, reservation: Reservation, timeout_s: float = TIMEOUT_S) -> TransferTarget:
        """The target of a transfer into the reservation."""
        return TransferTarget(
            transfer_id=reservation.transfer_id,
            decode=self.refs["decode"],
            handoff_endpoint=self.endpoint,
            start_token=reservation.start_token,
            end_token=reservation.end_token,
            deadline_s=time.monotonic() + timeout_s,
        )

    def work(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        generated: Sequence[int] = (),
        *,
        remote_kv: bool = True,
        **more: Any,
    ) -> DecodeWork:
        """Work for decode, under a new transfer id."""
        return DecodeWork(
            self.new_transfer_id(),
            (*prompt, *generated),
            sampling,
            remote_kv=remote_kv,
            generated_tokens=len(generated),
            **more,
        )

    async def plain(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        generated: Sequence[int] = (),
        **more: Any,
    ) -> Answer:
        """Generates on the decode engine alone, after the `generated` tokens. `more`: fields of the work."""
        answer = Answer()
        async with asyncio.timeout(TIMEOUT_S):
            work = self.work(prompt, sampling, generated, remote_kv=False, **more)
            async for event in decoded(self.decode, work):
                answer.take(event)
        return answer

    async def split(
        self,
        prompt: Sequence[int],
        sampling: Sampling = GREEDY,
        generated: Sequence[int] = (),
        **more: Any,
    ) -> Answer:
        """Prefills on one engine and decodes on the other, after the `generated` tokens. `more`: of both works."""
        answer = Answer()
        work = self.work(prompt, sampling, generated, **more)
        async with asyncio.timeout(TIMEOUT_S):
            async for event in decoded(self.decode, work):
                answer.take(event)
                if isinstance(event, Reservation) and event.start_token < event.end_token:
                    answer.prefill, answer.summary = await self.hand_over(
                        work.token_ids, event, **more
                    )
                    answer.arrived_ns = time.monotonic_ns()
                    self.decode.transfer_event(Arrived(work.transfer_id))
        return answer

    async def split_after_first(
        self, prompt: Sequence[int], sampling: Sampling = GREEDY, *, late: bool = False
    ) -> Answer:
        """Like `split`, but prefill chooses the first token. Ends when that token ends the answer.

        With `late`, the KV arrives before the token.
        """
        return await self._split_first(prompt, sampling, late=late, from_hidden_state=False)

    async def split_from_hidden_state(
        self, prompt: Sequence[int], sampling: Sampling = GREEDY, *, late: bool = False, **more: Any
    ) -> Answer:
        """Like `split`, but decode chooses the first token from prefill's hidden state.

        With `late`, the KV arrives before the state. `more`: fields of both works.
        """
        return await self._split_first(prompt, sampling, late=late, from_hidden_state=True, **more)

    async def _split_first(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        late: bool,
        from_hidden_state: bool,
        **more: Any,
    ) -> Answer:
        answer = Answer()
        work = self.work(
            prompt,
            sampling,
            awaits_first_token=True,
            from_hidden_state=from_hidden_state,
            **more,
        )
        reader = decoded(self.decode, work)
        async with asyncio.timeout(TIMEOUT_S):
            reservation = await anext(reader)
            assert isinstance(reservation, Reservation)
            answer.take(reservation)
            transfer = self.reserve(
                reservation, self.decode.hidden_format if from_hidden_state else None
            )
            target = replace(self.target(reservation), with_hidden_state=from_hidden_state)
            token: asyncio.Future[DecodeTokens] = asyncio.get_running_loop().create_future()
            task = PrefillWork(
                tuple(prompt), target, None if from_hidden_state else sampling, **more
            )
            on_first_token = None if from_hidden_state else token.set_result
            prefill = asyncio.create_task(self.prefill.prefill(task, on_first_token))
            if from_hidden_state:
                ends = False
                given: TransferEvent
                given = FirstHiddenState(work.transfer_id, await transfer.hidden_state())
            else:
                first = await token
                answer.take(first)
                (token_id,) = first.token_ids
                ends = token_id in sampling.stop_token_ids or sampling.max_tokens == 1
                given = FirstToken(work.transfer_id, token_id)
            if not late and not ends:
                self.decode.transfer_event(given)
            if from_hidden_state and not late:
                answer.take(await anext(reader))
                assert len(answer.token_ids) == 1
            answer.prefill, answer.summary = await asyncio.gather(prefill, transfer.wait())
            self.decode.transfer_event(Arrived(work.transfer_id))
            if late and not ends:
                await asyncio.sleep(0.2)
                self.decode.transfer_event(given)
            if not ends:
                async for event in reader:
                    answer.take(event)
            await reader.aclose()
        return answer

    def reserve(
        self, reservation: Reservation, hidden_format: HiddenFormat | None = None
    ) -> IncomingTransfer:
        """Starts the receiver's accounting for a reservation, as the decode service does."""
        return self.receiver.reserve(
            reservation,
            Deadline.after(TIMEOUT_S),
            hidden_format=hidden_format,
        )

    async def hand_over(
        self, prompt: Sequence[int], reservation: Reservation, **more: Any
    ) -> tuple[PrefillOutcome, TransferSummary]:
        """Transfers the prompt's KV into a reservation."""
        transfer = self.reserve(reservation)
        target = self.target(reservation)
        work = PrefillWork(tuple(prompt[:-1]), target, **more)
        outcome, summary = await asyncio.gather(self.prefill.prefill(work), transfer.wait())
        return outcome, summary


def counts(load: EngineLoad) -> dict[str, int]:
    """Requests and blocks."""
    names = ("running_requests", "waiting_requests", "used_blocks", "total_blocks")
    return {name: getattr(load, name) for name in names}


async def reset(engine: VllmEngine) -> None:
    """Empties an engine's prefix cache, once its last requests have freed their blocks."""
    assert engine._llm is not None
    await until(engine._llm.reset_prefix_cache)


@asynccontextmanager
async def running_pair(
    *, digests: bool | Literal["sums"] = False, **changes: dict[str, object]
) -> AsyncIterator[Pair]:
    """Starts both engines, before this process uses gRPC. `changes`: settings by role.

    With `digests`, decode checks all: with "sums" by word sums of its ranks.
    """
    configs = {role: engine_config(role, **changes.get(role, {})) for role in ("prefill", "decode")}
    refs = {role: config.ref for role, config in configs.items()}

    async def descriptors(ref: WorkerRef, deadline: Deadline) -> KvDescriptor:
        if ref != refs["decode"]:
            raise StaleIncarnation(f"{ref} is gone")
        return decode.descriptor

    decode = VllmEngine(configs["decode"], descriptors)
    prefill = VllmEngine(configs["prefill"], descriptors)
    pair = Pair(prefill, decode, refs)
    server: grpc.aio.Server | None = None
    checks: DigestChecks | None = None
    try:
        decode.launch()
        prefill.launch()
        await decode.attach()
        await prefill.attach()
        if digests is True:
            memory_of = decode.landed_memories.__getitem__
            checks = DigestChecks(decode.descriptor, "on", memory_of=memory_of)
        elif digests:
            checks = DigestChecks(
                decode.descriptor,
                "on",
                memory_of=dict(decode.landed_sums).__getitem__,
                word_sums=True,
            )
        pair.checks = checks
        pair.receiver = Receiver(
            ref=refs["decode"],
            layout=decode.descriptor.layout,
            tickets=NoTickets(),
            lease_ttl_s=LEASE_TTL_S,
            on_released=pair.release,
            broadcast=decode.broadcast,
            checks=checks,
        )
        server = grpc.aio.server()
        handoff_pb2_grpc.add_HandoffServiceServicer_to_server(
            HandoffServicer(pair.receiver), server
        )
        host = configs["decode"].host
        pair.endpoint = f"{host}:{server.add_insecure_port(f'{host}:0')}"
        await server.start()
        yield pair
    finally:
        if checks is not None:
            await asyncio.to_thread(checks.close)
        closing = asyncio.gather(prefill.close(), decode.close())
        await asyncio.wait({closing})
        if server is not None:
            await pair.receiver.drain(5)
            await server.stop(1)
        closing.result()

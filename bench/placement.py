"""Compares KV-aware placement with load alone and round robin, on sim workers of real services, in turns.

    python -m bench.placement [--rounds 3] [--first-round 0] [--trace one-prompt] [--conversations 24] [--turns 6]
        [--keep FILE] [--output bench/results]

Conversations over a few system prompts alternate. Every prompt is the whole conversation so far. In the trace
"one-prompt" they are short and start with the same long system prompt, which attracts all of them to one worker. All
ways run the same conversations, with other tokens in every round, so that no way finds blocks of another. The caches
of the workers hold less than all conversations. Uncached tokens are computed by a prefill worker, or on the decode
worker when few are missing there. The prefill queue prefers workers with the prefix in all ways. "KV-aware, 4" has
overlap_weight 4. Hits are prompt tokens that no worker computed. Balance is the busiest decode worker's number of
requests over the mean. The number of a round is its seed. --keep adds the rounds to those of earlier runs in FILE, and
reports on all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.placement_report import Row, draw, render
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.up.supervisor import Supervisor
from headrace_cli.up.topology import Topology, registry_spec, worker_specs
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.errors import NoDecodeWorker
from headrace_common.identity import new_incarnation
from headrace_common.registry.membership import Membership
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from headrace_common.telemetry import schema
from headrace_common.telemetry.setup import init_telemetry
from headrace_common.tickets.keys import SigningKey
from headrace_router.app import Router, assemble
from headrace_router.config import RouterConfig
from headrace_router.placement import (
    Candidates,
    Decision,
    KvAware,
    Placement,
    PlacementRequest,
)
from headrace_text.byte_codec import ByteCodec

# The weight of a missing token against a held one, where placement uses costs.
WEIGHTS = {
    **{f"KV-aware, {weight}": float(weight) for weight in (1, 2, 4, 8)},
    "load only": 0.0,
}
WAYS = (*WEIGHTS, "round robin")
ANSWER_TOKENS, THINK_S, STARTS_PER_S = 24, 0.5, 9.6
VOCABULARY = 512
CACHE_TOKENS = 10_240
BLOCK_TOKENS = 32
LOCAL_TOKENS = 256
REQUEST_TIMEOUT_S = 60.0
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.0004"),
    ("decode", "model", "sim:prefill_s_per_token=0.0004,decode_step_s=0.008"),
    *(
        (service, name, str(value))
        for service in ("prefill", "decode")
        for name, value in (
            ("num_gpu_blocks_override", CACHE_TOKENS // BLOCK_TOKENS),
            ("block_size", BLOCK_TOKENS),
        )
    ),
    ("decode", "max_num_seqs", "32"),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of the conversations."""

    conversations: int
    turns: int
    turn_tokens: tuple[int, int]
    systems: int
    system_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.conversations} conversations of {self.turns} turns over {self.systems} system "
            f"prompt{'s' if self.systems > 1 else ''} of {self.system_tokens} tokens"
        )


SHAPES = {
    "conversations": Shape(24, 6, (96, 192), 4, 256),
    "one-prompt": Shape(24, 4, (32, 64), 1, 1_024),
}


class RoundRobin(Placement):
    """Takes the next worker that may take the request, regardless of cache and load. Otherwise as KvAware."""

    def __init__(self, inner: Placement) -> None:
        self._inner = inner
        self._turns = itertools.count()

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        refs = [worker.ref for worker in candidates.decode.workers]
        usable = [ref for ref in refs if ref not in request.failed]
        if not usable:
            raise NoDecodeWorker("every decode worker failed")
        chosen = usable[next(self._turns) % len(usable)]
        others = frozenset(refs) - {chosen}
        return self._inner.choose(replace(request, failed=request.failed | others), candidates)


class InTurns(Placement):
    """Delegates to the current `way`."""

    def __init__(self) -> None:
        self.way = WAYS[0]
        self._aware = KvAware(random.Random(1))
        self._round_robin = RoundRobin(self._aware)

    def choose(self, request: PlacementRequest, candidates: Candidates) -> Decision:
        weight = WEIGHTS.get(self.way)
        if weight is None:
            return self._round_robin.choose(request, candidates)
        policy = replace(request.policy, overlap_weight=weight)
        return self._aware.choose(replace(request, policy=policy), candidates)


@dataclass(frozen=True, slots=True)
class Turn:
    """The text that a user adds after `think_s`."""

    think_s: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation that starts with a shared system prompt."""

    system: tuple[int, ...]
    turns: tuple[Turn, ...]


def make_trace(like: Shape, seed: int, tokens_seed: int) -> list[Conversation]:
    """Draws conversations. `seed` sets lengths and times, `tokens_seed` the tokens."""
    shape, tokens = random.Random(seed), random.Random(tokens_seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(tokens.randrange(VOCABULARY) for _ in range(count))

    start_s = like.conversations / STARTS_PER_S
    systems = [some(like.system_tokens) for _ in range(like.systems)]
    return [
        Conversation(
            shape.choice(systems),
            tuple(
                Turn(
                    shape.expovariate(1 / THINK_S) if number else shape.uniform(0, start_s),
                    some(shape.randint(*like.turn_tokens)),
                )
                for number in range(like.turns)
            ),
        )
        for _ in range(like.conversations)
    ]


@dataclass(slots=True)
class Tally:
    """What the requests of a way saw in one round."""

    ttft_s: list[float] = field(default_factory=list)
    trace_ids: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Prompt tokens and those that decode had cached, by trace."""
    decode: Counter[str] = field(default_factory=Counter)
    remote: set[str] = field(default_factory=set)
    took_s: float = 0.0


async def converse(
    stub: Any,
    conversation: Conversation,
    tally: Tally,
    metadata: tuple[tuple[str, str], ...] = (),
) -> None:
    """Sends every turn after the answer to the one before."""
    history = list(conversation.system)
    for turn in conversation.turns:
        await asyncio.sleep(turn.think_s)
        history += turn.token_ids
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=history),
            sampling=sampling_pb2.SamplingParams(
                temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True
            ),
        )
        start_s = time.monotonic()
        first_s = 0.0
        trace_id = ""
        async for response in stub.Generate(request, timeout=REQUEST_TIMEOUT_S, metadata=metadata):
            trace_id = trace_id or response.trace_id
            if response.token_ids and not first_s:
                first_s = time.monotonic()
            history += (token % VOCABULARY for token in response.token_ids)
            if response.HasField("timing"):
                worker_id = response.timing.decode_worker_id
                tally.decode[worker_id] += 1
                if response.timing.prefill_worker_id:
                    tally.remote.add(trace_id)
                usage = response.usage
                tally.trace_ids[trace_id] = (usage.prompt_tokens, usage.decode_cached_tokens)
        tally.ttft_s.append(first_s - start_s)


async def computed_tokens(router: Router, tally: Tally) -> int:
    """Prompt tokens that workers computed, by the spans of remote prefills."""
    computed = sum(
        prompt - cached
        for trace_id, (prompt, cached) in tally.trace_ids.items()
        if trace_id not in tally.remote
    )
    for trace_id in tally.remote:
        computed += await _prefilled_in_time(router, trace_id)
    return computed


async def _prefilled_in_time(router: Router, trace_id: str) -> int:
    for _ in range(300):
        tokens = _prefilled(router, trace_id)
        if tokens is not None:
            return tokens
        await asyncio.sleep(0.05)
    raise TimeoutError(f"the prefill worker's spans of {trace_id} did not come")


def _prefilled(router: Router, trace_id: str) -> int | None:
    trace = router.traces.get(trace_id)
    spans = [span for span in trace.spans if span.name == schema.SPAN_PREFILL_COMPUTE]
    if not spans:
        return None
    return sum(int(span.attributes[schema.ATTRIBUTE_TOKENS]) for span in spans)


@asynccontextmanager
async def router_of(
    registry: str, placement: Placement, router_id: str = "router-0", **more: str
) -> AsyncIterator[tuple[Router, str]]:
    """A router in this process, assembled as by its own main. `more` are further settings."""
    settings: dict[str, Any] = {"model": "sim", "registry": registry, "trace_count": 4_096, **more}
    config = RouterConfig(**settings)
    async with AsyncExitStack() as stack:
        telemetry = init_telemetry("router", router_id, config)
        stack.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        channel = await stack.enter_async_context(open_channel(registry, config))
        view = RegistryView(channel, on_change=lambda view: router.update(view.members.values()))
        membership: Membership | None = None
        ticket_key = SigningKey()
        router = assemble(
            config,
            {"sim": ByteCodec()},
            telemetry,
            view,
            lambda: membership.prefix_hash_key if membership else 0,
            ticket_key,
            placement,
        )
        stack.push_async_callback(router.close)
        stack.push_async_callback(view.stop)
        await view.start()
        server = router.new_server(config)
        stack.push_async_callback(server.stop, None)
        endpoint = await server.start()
        member = registry_pb2.Member(
            worker_id=router_id,
            incarnation=new_incarnation(),
            role=registry_pb2.Member.ROLE_ROUTER,
            endpoint=endpoint,
            client_endpoint=server.client_endpoint,
            start_unix_ns=time.time_ns(),
            ticket_public_key=ticket_key.public.public_key,
        )
        membership = Membership(channel, member)
        stack.push_async_callback(membership.stop)
        await membership.start()
        yield router, server.client_endpoint


async def wait_joined(router: Router, prefill_count: int, decode_count: int) -> None:
    """Waits until the router uses these numbers of workers."""
    for _ in range(600):
        table = router.workers.table("sim")
        pulling = router.queue.worker_counts().get("sim", 0)
        if pulling == prefill_count and len(table) == decode_count and table.reachable.all():
            return
        await asyncio.sleep(0.05)
    raise TimeoutError("not every worker joined")


async def replay(
    router: Router, endpoint: str, placement: InTurns, rounds: range, shape: Shape
) -> dict[str, list[Row]]:
    """Measures every way once per round, starting with another way each time."""
    rows: dict[str, list[Row]] = {way: [] for way in WAYS}
    async with open_channel(endpoint) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        for number in rounds:
            shift = number % len(WAYS)
            for way in (*WAYS[shift:], *WAYS[:shift]):
                placement.way = way
                trace = make_trace(shape, number, 1_000 * number + WAYS.index(way))
                tally = Tally()
                start_s = time.monotonic()
                async with asyncio.timeout(120), asyncio.TaskGroup() as group:
                    for conversation in trace:
                        group.create_task(converse(stub, conversation, tally))
                tally.took_s = time.monotonic() - start_s
                rows[way].append(_row(tally, await computed_tokens(router, tally)))
    return rows


def _row(tally: Tally, computed: int) -> Row:
    prompt = sum(tokens for tokens, _ in tally.trace_ids.values())
    mean = tally.decode.total() / max(1, len(tally.decode))
    return Row(
        hit_rate=1 - computed / prompt,
        decode_hit_rate=sum(cached for _, cached in tally.trace_ids.values()) / prompt,
        remote_share=len(tally.remote) / len(tally.trace_ids),
        ttft_s=tuple(tally.ttft_s),
        balance=max(tally.decode.values()) / mean,
        took_s=tally.took_s,
    )


@asynccontextmanager
async def workers_running(prefill_count: int, decode_count: int) -> AsyncIterator[str]:
    """Starts registry and workers as processes, with the policy of the benchmark. Yields the registry's endpoint."""
    topology = Topology(
        engine="sim", prefill_count=prefill_count, decode_count=decode_count, settings=SETTINGS
    )
    supervisor = Supervisor()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        await supervisor.open()
        try:
            registry = await supervisor.start(registry_spec(topology, folder))
            await supervisor.wait_ready([registry])
            specs = worker_specs(topology, folder, registry.endpoint)
            await supervisor.wait_ready([await supervisor.start(spec) for spec in specs])
            operator = Credentials(role=Role.OPERATOR)
            async with open_channel(registry.endpoint, operator) as channel:
                policy = registry_pb2.Policy(local_prefill_max_tokens=LOCAL_TOKENS)
                stub = registry_pb2_grpc.RegistryServiceStub(channel)
                await stub.SetPolicy(registry_pb2.SetPolicyRequest(policy=policy), timeout=5)
            yield registry.endpoint
        finally:
            await supervisor.stop()


async def measure(
    rounds: range, shape: Shape, prefill_count: int, decode_count: int
) -> dict[str, list[Row]]:
    """Starts registry and workers as processes, and the router here."""
    placement = InTurns()
    async with (
        workers_running(prefill_count, decode_count) as registry,
        router_of(registry, placement) as (router, endpoint),
    ):
        await wait_joined(router, prefill_count, decode_count)
        return await replay(router, endpoint, placement, rounds, shape)


def _with_earlier(file: Path, rows: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """The rounds in the file and these. Adds these to the file."""
    known: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.exists() else {}
    for way, found in rows.items():
        known.setdefault(way, []).extend(map(asdict, found))
    file.write_text(json.dumps(known))
    return {
        way: [Row(**{**row, "ttft_s": tuple(row["ttft_s"])}) for row in found]
        for way, found in known.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-round", type=int, default=0, help="its number, which is its seed")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers")
    parser.add_argument("--decode", type=int, default=4, help="decode workers")
    parser.add_argument(
        "--keep", type=Path, help="JSON of all rounds so far, to which these are added"
    )
    parser.add_argument("--output", type=Path, help="folder for the table and the picture")
    parser.add_argument("--trace", choices=SHAPES, default="conversations")
    parser.add_argument("--conversations", type=int, help="instead of the trace's number")
    parser.add_argument(
        "--turns", type=int, help="of a conversation, instead of the trace's number"
    )
    options = parser.parse_args()
    rounds = range(options.first_round, options.first_round + options.rounds)
    shape = SHAPES[options.trace]
    shape = replace(
        shape,
        conversations=options.conversations or shape.conversations,
        turns=options.turns or shape.turns,
    )
    rows: dict[str, list[Row]] = {}
    if rounds:
        rows = asyncio.run(measure(rounds, shape, options.prefill, options.decode))
    if options.keep:
        rows = _with_earlier(options.keep, rows)
    what = (
        f"{shape}. {options.prefill} prefill and {options.decode} decode sim workers with room for {CACHE_TOKENS} "
        f"tokens each, {max(map(len, rows.values()))} rounds"
    )
    text = render(rows, what)
    print(text)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        name = "placement" if options.trace == "conversations" else f"placement_{options.trace}"
        (options.output / f"{name}.md").write_text(text)
        (options.output / f"{name}.svg").write_text(draw(rows, str(shape)))
    print(
        f"median round: {statistics.median(row.took_s for found in rows.values() for row in found):.1f} s"
    )


if __name__ == "__main__":
    main()

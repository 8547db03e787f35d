"""Requests through deployments with and without access control. See bench/security/__main__.py."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.placement.report import percentile
from bench.support.processes import cpu_seconds
from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_cli.up.supervisor import Child, Spawn, Supervisor
from headrace_cli.up.topology import Topology, registry_spec, router_spec, worker_specs
from headrace_common.access.credentials import TlsFiles
from headrace_common.access.roles import Role
from headrace_common.access.tokens import create_token, new_private_key, public_key_of
from headrace_common.rpc.channel import open_channel
from tests.fork_server import forking
from tests.suite.certificates import Authority
from tests.suite.deployment import greedy, prompt_of
from tests.suite.secured import SERVICES, joined

PLAIN: Final = "plaintext"
TOKENS: Final = "tokens"
TLS: Final = "TLS"
TLS_ROLES: Final = "TLS, roles"
KINDS: Final[Mapping[str, str]] = {PLAIN: PLAIN, TOKENS: PLAIN, TLS: PLAIN, TLS_ROLES: TLS}
"""The kinds of deployments, and the one that each is compared with."""
_PROMPT_TOKENS: Final = 64
_ANSWER_TOKENS: Final = 16
_DEADLINE_S: Final = 60.0
_WORKERS: Final = "sim:decode_step_s=0.002"

Settings = tuple[tuple[str, str, str], ...]
Ask = Callable[[inference_pb2.GenerateRequest], Awaitable[float]]
"""Sends a request, reads its answer and returns the time to its first token in seconds."""


@dataclass(slots=True)
class Sample:
    """One kind in one round."""

    first_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.first_s) / self.seconds

    @property
    def cpu_ms(self) -> float:
        """CPU time of one request."""
        return self.cpu_s / len(self.first_s) * 1e3


Samples = dict[str, list[Sample]]


@dataclass(frozen=True, slots=True)
class _Way:
    kind: str
    ask: Ask
    process_ids: tuple[int, ...]


async def measure_cost(streams: int, rounds: int, seconds: float) -> Samples:
    """The rounds by kind."""
    samples: Samples = {}
    numbers = iter(range(10**9))
    async with AsyncExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        spawn = await held.enter_async_context(forking())
        ways = [
            await _open(held, spawn, _subfolder(folder, kind), kind, settings, tls)
            for kind, (settings, tls) in _kinds(folder).items()
        ]
        for way in ways:
            await _load(way, streams, min(1.0, seconds), numbers)
        for number in range(rounds):
            # Each way follows another one in the next round.
            first = number % len(ways)
            for way in (*ways[first:], *ways[:first]):
                sample = await _load(way, streams, seconds, numbers)
                samples.setdefault(way.kind, []).append(sample)
    return samples


def _subfolder(folder: Path, kind: str) -> Path:
    made = folder / kind.replace(", ", "-")
    made.mkdir()
    return made


def _kinds(folder: Path) -> dict[str, tuple[Settings, TlsFiles]]:
    """Settings of the services and files of the client, by kind."""
    key = new_private_key()
    keys_file = folder / "keys.pem"
    keys_file.write_bytes(public_key_of(key))
    authority = Authority(folder / "authority")
    tokens: list[tuple[str, str, str]] = []
    tls: list[tuple[str, str, str]] = []
    for service in SERVICES:
        token_file = folder / f"{service}.token"
        token_file.write_text(create_token(key, Role(service), "", 36_000))
        tokens.append((service, "token_file", str(token_file)))
        tokens.append((service, "token_keys_file", str(keys_file)))
        files = asdict(authority.sign(service, service))
        tls += [(service, name, value) for name, value in files.items()]
    insecure = tuple((service, "insecure", "true") for service in SERVICES)
    client = authority.sign("client")
    return {
        PLAIN: (insecure, TlsFiles()),
        TOKENS: (tuple(tokens), TlsFiles()),
        TLS: ((*insecure, *tls), client),
        TLS_ROLES: (tuple(tls), client),
    }


async def _open(
    held: AsyncExitStack, spawn: Spawn, folder: Path, kind: str, settings: Settings, tls: TlsFiles
) -> _Way:
    children = await held.enter_async_context(_deployed(spawn, folder, settings))
    router = children["router"].client_endpoint
    channel = await held.enter_async_context(open_channel(router, tls))
    await joined(channel)
    pids = tuple(child.process.pid for child in children.values())
    return _Way(kind, _through_router(channel), pids)


@asynccontextmanager
async def _deployed(
    spawn: Spawn, folder: Path, settings: Settings
) -> AsyncIterator[dict[str, Child]]:
    more = (("prefill", "model", _WORKERS),)
    topology = Topology(
        engine="sim", port=0, settings=(*settings, *more, ("decode", "model", _WORKERS))
    )
    supervisor = Supervisor(spawn=spawn)
    await supervisor.open()
    try:
        registry = await supervisor.start(registry_spec(topology, folder))
        await supervisor.wait_ready([registry])
        for spec in (
            router_spec(topology, folder, registry.endpoint),
            *worker_specs(topology, folder, registry.endpoint),
        ):
            await supervisor.start(spec)
        async with asyncio.timeout(_DEADLINE_S):
            await supervisor.wait_ready(supervisor.children)
        yield {child.spec.service: child for child in supervisor.children}
    finally:
        await supervisor.stop()


def _through_router(channel: Any) -> Ask:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)

    async def ask(request: inference_pb2.GenerateRequest) -> float:
        return await _first_s(stub.Generate(request, timeout=_DEADLINE_S))

    return ask


async def _first_s(responses: Any) -> float:
    start_s, first_s, count = time.perf_counter(), 0.0, 0
    async for response in responses:
        first_s = first_s or time.perf_counter()
        count += len(response.token_ids)
    if count != _ANSWER_TOKENS:
        raise ValueError(f"{count} tokens came, not {_ANSWER_TOKENS}")
    return first_s - start_s


async def _load(way: _Way, streams: int, seconds: float, numbers: Any) -> Sample:
    sample = Sample()
    start_s = time.perf_counter()
    before_s = sum(map(cpu_seconds, way.process_ids))

    async def ask_on() -> None:
        while time.perf_counter() - start_s < seconds:
            request = greedy(
                prompt_of(_PROMPT_TOKENS, next(numbers)),
                _ANSWER_TOKENS,
                inference_pb2.PREFILL_PLACEMENT_REMOTE,
            )
            sample.first_s.append(await way.ask(request))

    await asyncio.gather(*(ask_on() for _ in range(streams)))
    sample.seconds = time.perf_counter() - start_s
    sample.cpu_s = sum(map(cpu_seconds, way.process_ids)) - before_s
    return sample


def render_cost(samples: Samples) -> str:
    """A table by kind: medians of the rounds, and percentiles over all requests."""
    head = ["kind", "requests/s", "TTFT p50, ms", "TTFT p99, ms", "CPU ms a request"]
    head += ["CPU ratio", "beside"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for kind, base in KINDS.items():
        rows, others = samples[kind], samples[base]
        first_s = [second for row in rows for second in row.first_s]
        cells = [
            kind,
            f"{statistics.median(row.rate for row in rows):.1f}",
            f"{percentile(first_s, 0.5) * 1e3:.1f}",
            f"{percentile(first_s, 0.99) * 1e3:.1f}",
            f"{statistics.median(row.cpu_ms for row in rows):.2f}",
            f"{_ratio(rows, others):.3f}",
            base,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(rows: Sequence[Sample], others: Sequence[Sample]) -> float:
    pairs = zip(rows, others, strict=True)
    return statistics.median(row.cpu_ms / other.cpu_ms for row, other in pairs)

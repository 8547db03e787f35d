"""Requests through real services: registry, router, prefill and decode workers, with the KV over RDMA."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import DeadlineExceeded
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings
from tests.forked import Forked, fork
from tests.rdma.cases import MODELS, Group
from tests.rdma.device import Traffic, check_moved_by_rdma, traffic
from tests.rdma.processes import log_of, start_service, stop, wait_serving
from tests.rdma.report import Result, note_of, show_logs, write_result
from tests.waiting import until

if TYPE_CHECKING:
    from headrace_cli.client import RouterClient

REGISTRY_PORT = 7001
ROUTER_PORT = 7050
PROMPT_TOKENS = 300
ANSWER_TOKENS = 4
_BLOCK_TOKENS = 16
_PROMPT_VOCABULARY = 512
_REQUEST_TIMEOUT_S = 200.0
_CLIENT_TIMEOUT_S = 700.0
_ROUNDS_MAX = 6
_JOIN_TIMEOUT_S = 200.0
INSTALLED = re.compile(r"installTransport, type=(\w+)")


@dataclass(frozen=True, slots=True)
class Site:
    """Addresses of the registry, the router and this machine."""

    center: str
    here: str

    @property
    def registry(self) -> str:
        return f"{self.center}:{REGISTRY_PORT}"

    @property
    def router(self) -> str:
        return f"{self.center}:{ROUTER_PORT}"


SIM_MODELS = ",".join(f"{layout}=sim" for layout in MODELS)


@contextmanager
def center(site: Site, models: str = SIM_MODELS) -> Iterator[None]:
    """A registry, and a router that serves `models`, by default one for each layout."""
    started = [start_service("registry", "registry", [f"--internal-listen={site.registry}"])]
    try:
        wait_serving(started)
        flags = [
            f"--listen={site.router}",
            "--anonymous-clients",
            f"--internal-listen={site.here}:0",
            f"--registry={site.registry}",
            f"--model={models}",
        ]
        started.append(start_service("router", "router", [*flags, "--router-id=router-0"]))
        wait_serving(started)
        yield
        for service in reversed(started):
            stop([service])
    finally:
        for service in started:
            service.kill()


def start_worker(role: str, group: Group, ranks: int, site: Site) -> Forked:
    """A prefill or decode worker of the group, on this machine."""
    worker_id = group.prefill_id if role == "prefill" else group.decode_id(ranks)
    flags = {
        "internal-listen": f"{site.here}:0",
        "registry": site.registry,
        "worker-id": worker_id,
        "model": group.prefill_model if role == "prefill" else group.model,
        "served-model": group.layout,
        "tensor-parallel-size": ranks,
        "block-size": _BLOCK_TOKENS,
        "num-gpu-blocks-override": 128,
        "max-num-seqs": 4,
        # Two chunks of the prompt.
        "max-num-batched-tokens": 160,
        # Under emulation on a busy machine, every heartbeat is late.
        "lease-ttl-s": 60,
    }
    return start_service(role, worker_id, [f"--{name}={value}" for name, value in flags.items()])


@contextmanager
def running(workers: list[Forked]) -> Iterator[None]:
    """Runs the workers, which must exit with 0."""
    try:
        wait_serving(workers)
        yield
        stop(workers)
    finally:
        for worker in workers:
            worker.kill()


def serve_lane(lane: Sequence[Group], site: Site) -> None:
    """Runs all groups of a machine in order, those of one layout on the same decode workers, and reports every pair."""
    for _, neighbours in groupby(lane, lambda group: group.layout):
        groups = list(neighbours)
        ranks = sorted({ranks for group in groups for ranks in group.decode_ranks})
        with running([start_worker("decode", groups[0], count, site) for count in ranks]):
            for group in groups:
                with running([start_worker("prefill", group, group.prefill_ranks, site)]):
                    # A process that uses gRPC must not fork, so the requests come from a process of their own.
                    client = fork(group.prefill_id, partial(ask_and_report, group, site, _inside))
                    assert client.wait(_CLIENT_TIMEOUT_S) == 0, f"no requests to {group.prefill_id}"


def ask_and_report(group: Group, site: Site, moved: Callable[[Group, Traffic], str]) -> None:
    """Sends the group's requests and reports each pair. `moved` explains how RDMA is proved."""
    started_s = time.monotonic()
    seen: set[int] = set()
    try:
        counted, rounds = asyncio.run(_ask_all(group, site, seen))
        for ranks in group.decode_ranks:
            check_engines(group.decode_id(ranks))
        note = f"{moved(group, counted)}, {rounds} round(s)"
        passed = True
    # Any exception is the result.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        show_logs(f"*-{group.layout}-*.log", "router.log")
        note, passed = note_of(error), False
    for ranks in group.decode_ranks:
        duration_s = time.monotonic() - started_s
        write_result(Result(group.pair_name(ranks), passed, duration_s, note))


def _inside(group: Group, counted: Traffic) -> str:
    check_engines(group.prefill_id)
    return check_moved_by_rdma(counted, payload_bytes(group))


async def _ask_all(group: Group, site: Site, seen: set[int]) -> tuple[Traffic, int]:
    """Sends rounds of requests until every decode worker has answered one with KV by RDMA.

    The router gives concurrent requests to different workers. An emulated machine can be so late that the router
    falls back to a local prefill. That is correct, but not this case, so the request is sent again.
    """
    # Starts gRPC's threads, so only after the forks.
    from headrace_cli.client import open_router

    async with open_router(site.router) as router:
        await _joined(router, group)
        start = traffic()
        for number in range(1, _ROUNDS_MAX + 1):
            prompts = [_prompt(group, number, ranks) for ranks in group.decode_ranks]
            answers = await asyncio.gather(*(_ask(router, group, prompt) for prompt in prompts))
            seen |= {ranks for ranks in group.decode_ranks if group.decode_id(ranks) in answers}
            if seen == set(group.decode_ranks):
                return traffic() - start, number
    raise AssertionError(
        f"in {_ROUNDS_MAX} rounds only decode workers of {sorted(seen)} ranks got KV"
    )


async def _ask(router: RouterClient, group: Group, prompt: list[int]) -> str:
    """Sends one request with an answer that must equal the closed form. Returns the decode worker, or "" after a
    local prefill.
    """
    tokens: list[int] = []
    last = inference_pb2.GenerateResponse()
    async for response in router.generate(_greedy(group, prompt), _REQUEST_TIMEOUT_S):
        tokens += response.token_ids
        last = response
    expected = SimModel(parse_settings(group.model)).expected_tokens(prompt, ANSWER_TOKENS)
    assert tuple(tokens) == expected, f"the answer is {tokens}, not {expected}"
    remote = last.timing.prefill_worker_id == group.prefill_id
    if not remote or last.usage.transferred_tokens != PROMPT_TOKENS:
        return ""
    return last.timing.decode_worker_id


def payload_bytes(group: Group) -> int:
    """Bytes of the KV of all prompt tokens, for each decode worker once."""
    return PROMPT_TOKENS * token_bytes(group.model) * len(group.decode_ranks)


def token_bytes(model: str) -> int:
    """Bytes of the attention KV of one token."""
    settings = parse_settings(model)
    return settings.layers * settings.heads * settings.head_bytes


def check_engines(worker: str) -> None:
    """Every Mooncake engine of the worker reports RDMA and no other transport."""
    kinds = INSTALLED.findall(log_of(worker).read_text(errors="replace"))
    assert kinds, f"{worker}'s log names no transport"
    assert set(kinds) == {"rdma"}, f"{worker}'s engines use {kinds}"


def _prompt(group: Group, *numbers: int) -> list[int]:
    generator = random.Random(f"{group.prefill_id} {numbers}")
    return [generator.randrange(_PROMPT_VOCABULARY) for _ in range(PROMPT_TOKENS)]


def _greedy(group: Group, prompt: list[int]) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=group.layout,
        tokens=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(
            temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True
        ),
        prefill_placement=inference_pb2.PREFILL_PLACEMENT_REMOTE,
    )


async def _joined(router: RouterClient, group: Group) -> None:
    expected = (group.layout, 1, len(group.decode_ranks))
    listed: list[tuple[str, int, int]] = []

    async def is_complete() -> bool:
        # The first call can exceed its deadline.
        with contextlib.suppress(DeadlineExceeded):
            listed[:] = [
                (m.name, m.prefill_worker_count, m.decode_worker_count)
                for m in (await router.listing()).models
            ]
        return expected in listed

    await until(
        is_complete,
        _JOIN_TIMEOUT_S,
        lambda: f"the router lists {expected}; it lists {listed}",
        interval_s=0.05,
    )

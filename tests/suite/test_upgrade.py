"""A deployment of the previous release becomes one of this release under load, and no request fails.

Every service restarts on its address, one after the other. Half of them change first, so each service of one release
meets each of the other. A client may retry once when a router reports that it drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_cli.client import list_members
from headrace_common.errors import Draining, WorkerGone
from headrace_common.version import version
from tests.fork_server import ForkClient
from tests.ports import free_port
from tests.suite.deployment import Outcome, Suite, suite
from tests.suite.load import load
from tests.suite.previous_release import forks_of, mixing, previous_release
from tests.waiting import until

STREAMS = 4
ANSWER_TOKENS = 12
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
CANARIES = ("registry", "router", "decode-0", "prefill-0")
REST = ("decode-1", "prefill-1", "router-1")
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.0005"),
    ("decode", "model", "sim:decode_step_s=0.01"),
)
RESTART_S = 60.0
PAIRS_S = 60.0
Pair = tuple[bool, bool]
ALL_PAIRS = {(one, other) for one in (False, True) for other in (False, True)}


@dataclass(slots=True)
class Mixture:
    """Sends requests through two routers, and records which releases have handed KV over to which.

    A pair says of the prefill and of the decode worker whether it is of the previous release.
    """

    ways: tuple[Suite, Suite]
    old: set[str]
    pairs: set[Pair] = field(default_factory=set)
    changes: int = 0

    async def ask(self, stream: int, prompt: Sequence[int]) -> tuple[int, ...]:
        way, other = self.ways if stream % 2 else self.ways[::-1]
        changes = self.changes
        try:
            outcome = await way.generate(prompt, ANSWER_TOKENS, placement=REMOTE)
        except (Draining, WorkerGone) as error:
            if "worker_id" in error.metadata:
                raise
            outcome = await other.generate(prompt, ANSWER_TOKENS, placement=REMOTE)
        if changes == self.changes:
            self._record(outcome)
        return outcome.token_ids

    def _record(self, outcome: Outcome) -> None:
        timing = outcome.last.timing
        if timing.prefill_worker_id:
            workers = (timing.prefill_worker_id, timing.decode_worker_id)
            self.pairs.add((workers[0] in self.old, workers[1] in self.old))

    async def move(self, name: str, *, back: bool = False) -> None:
        """Restarts a service as one of this release, or `back` as one of the previous one, and waits for it."""
        it = self.ways[0]
        self.changes += 1
        assert await it.terminate(name, RESTART_S) == 0, name
        if back:
            self.old.add(name)
        else:
            self.old.discard(name)
        await it.restart(name)
        for way in self.ways:
            async with asyncio.timeout(RESTART_S):
                await way.channel.channel_ready()
            await way.wait_joined(2, 2)
        self.changes += 1

    async def met(self, pairs: set[Pair]) -> None:
        """Waits until these pairs have handed KV over."""
        await until(lambda: pairs <= self.pairs, PAIRS_S, lambda: f"{self.pairs} of {pairs}", 0.02)


async def versions(it: Suite) -> set[str]:
    """The versions that the members have registered."""
    members = await list_members(it.deployment.registry)
    return {member.version for member in members}


@pytest.mark.timeout(400)
async def test_a_rolling_upgrade_and_a_way_back_under_load_fail_no_request(tmp_path: Path) -> None:
    listen = [
        (name, setting, f"127.0.0.1:{free_port()}")
        for name, setting in (("registry", "internal_listen"), ("router", "listen"))
    ]
    old = {*CANARIES, *REST}
    async with AsyncExitStack() as held:
        client = ForkClient(held.enter_context(forks_of(previous_release())))
        held.push_async_callback(client.close)
        it = await held.enter_async_context(
            suite(
                tmp_path,
                spawning=mixing(client.spawn, old),
                prefill_count=2,
                decode_count=2,
                settings=(*SETTINGS, *listen),
            )
        )
        other = await it.add("router-1", "router", f"--listen=127.0.0.1:{free_port()}")
        by_other = await held.enter_async_context(it.through(other))
        await by_other.wait_joined(2, 2)
        assert await versions(it) == {""}
        mixture = Mixture((it, by_other), old)
        async with load(it, STREAMS, ANSWER_TOKENS, mixture.ask) as answers:
            await mixture.met({(True, True)})
            for name in CANARIES:
                await mixture.move(name)
                await answers.more(STREAMS)
            await mixture.met(ALL_PAIRS)
            for name in ("prefill-0", "decode-0"):
                await mixture.move(name, back=True)
                await answers.more(STREAMS)
            for name in ("decode-0", "prefill-0", *REST):
                await mixture.move(name)
                await answers.more(STREAMS)
            mixture.pairs.clear()
            await mixture.met({(False, False)})
        assert await versions(it) == {version()}

"""A planner and the supervisor: workers follow a load that triples and falls, also over a restart of the planner."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from headrace.planner.v1 import planner_pb2
from headrace_cli.commands.planner import read_explanation
from headrace_cli.up.keeping import RestartPolicy, keep
from headrace_cli.up.topology import Topology
from headrace_common.errors import HeadraceError
from tests.suite.deployment import Suite, prompt_of, suite
from tests.waiting import until

PROMPT_TOKENS = 50
ANSWER_TOKENS = 40
# A prompt takes a prefill worker 0.2 s, and an answer a decode worker 0.8 s: much longer than the processes need.
SETTINGS = (
    ("prefill", "model", "sim:prefill_s_per_token=0.004"),
    ("prefill", "max_num_seqs", "1"),
    ("decode", "model", "sim:decode_step_s=0.02"),
    ("decode", "max_num_seqs", "8"),
    ("planner", "interval_s", "0.6"),
    ("planner", "sample_interval_s", "0.1"),
)
RULES = """
[load]
prefill_up_queue = 1.0
prefill_down_queue = 0.5
trend_intervals = 0
decode_grace_intervals = 1
[budget]
devices_max = 6
"""
LOOPS = 4
# Every step is a few decisions and a start or a drain: seconds, and on a busy machine many times that.
STEP_S = 45.0


@dataclass
class Load:
    """Loops that send one request after the other, and check every answer."""

    it: Suite
    answered: int = 0
    failures: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    ending: list[asyncio.Event] = field(default_factory=list)

    def set_loops(self, count: int) -> None:
        """Starts or ends loops. Ended ones finish their request."""
        while len(self.ending) < count:
            self.ending.append(asyncio.Event())
            self.tasks.append(asyncio.create_task(self._loop(len(self.tasks), self.ending[-1])))
        while len(self.ending) > count:
            self.ending.pop().set()

    async def finish(self) -> None:
        self.set_loops(0)
        await asyncio.gather(*self.tasks)

    async def _loop(self, number: int, ending: asyncio.Event) -> None:
        sent = 0
        while not ending.is_set():
            sent += 1
            prompt = prompt_of(PROMPT_TOKENS, 1_000 * number + sent)
            try:
                outcome = await self.it.generate(prompt, ANSWER_TOKENS, timeout_s=60.0)
            except HeadraceError as error:
                self.failures.append(f"{type(error).__name__}: {error.detail}")
                continue
            if outcome.token_ids != self.it.expected(prompt, ANSWER_TOKENS):
                self.failures.append(f"a wrong answer to prompt {number}/{sent}")
            self.answered += 1


@asynccontextmanager
async def kept(it: Suite, topology: Topology, log: Path) -> AsyncIterator[None]:
    """Does what `headrace up` does while it serves."""
    policy = RestartPolicy(first_delay_s=0.1)
    with log.open("w") as file:
        keeping = asyncio.create_task(keep(topology, it.deployment, Console(file=file), policy))
        try:
            yield
            # Nothing has ended for good.
            assert not keeping.done(), keeping.exception()
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def counts(it: Suite) -> tuple[int, int]:
    """The prefill and decode workers that the router uses."""
    (model,) = (await it.client.listing()).models
    return model.prefill_worker_count, model.decode_worker_count


async def test_workers_follow_a_load_that_triples_and_falls_over_a_killed_planner(
    tmp_path: Path,
) -> None:
    rules = tmp_path / "planner.toml"
    rules.write_text(RULES)
    settings = (*SETTINGS, ("planner", "settings_file", str(rules)))
    topology = Topology(engine="sim", port=0, settings=settings, planner=True)
    async with (
        suite(tmp_path, settings=settings, planner=True) as it,
        kept(it, topology, tmp_path / "kept.log"),
    ):
        load = Load(it)
        seen: list[tuple[int, int]] = []

        async def reached(prefill: range, decode: range) -> bool:
            seen.append(await counts(it))
            return seen[-1][0] in prefill and seen[-1][1] in decode

        def shown() -> str:
            return f"{seen[-1:]}\n" + (tmp_path / "planner.log").read_text()[-4_000:]

        several = range(2, 7)
        load.set_loops(LOOPS)
        await until(lambda: load.answered >= LOOPS, STEP_S, "the first answers")
        load.set_loops(3 * LOOPS)
        await until(lambda: reached(range(1, 7), several), STEP_S, shown, 0.05)
        old = it.child("planner")
        os.kill(old.process.pid, signal.SIGKILL)
        await until(lambda: it.child("planner") is not old, STEP_S, "another planner")
        await until(lambda: reached(several, several), STEP_S, shown, 0.05)
        load.set_loops(1)
        await until(lambda: reached(range(1, 2), range(1, 2)), STEP_S, shown, 0.05)
        explained = await read_explanation(it.deployment.planner, 1_000)
        await load.finish()
    assert load.failures == []
    assert load.answered > 3 * LOOPS
    # The planner that started again has removed workers, and explains it.
    removals = [
        reason.rule
        for decision in explained.decisions
        if decision.outcome
        in (planner_pb2.Decision.OUTCOME_APPLIED, planner_pb2.Decision.OUTCOME_PUBLISHED)
        for reason in decision.reasons
    ]
    assert {"queue below threshold", "load below threshold"} <= set(removals)

"""Where a prefix is fetched from, and for how long a prompt waits for it."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace_common.errors import DeadlineExceeded
from headrace_common.time_model.model import StepTimes, TimeModel
from headrace_kv.layout import WorkerRef
from headrace_kv.prefix.fetch_rule import FetchRule
from headrace_router.dispatch.prefix_fetch import FETCH_MIN_S, FETCH_S, PrefixFetches, Warming
from headrace_router.workers.table import Load, LoadTable, Worker
from tests.sim_layout import LAYOUT

TOKEN_S = 0.0005
TIMES = TimeModel(StepTimes(fixed_s=0.0, s_per_prompt_token=TOKEN_S, prompt_steps=50))
TOKENS = 8_000


class Fetching:
    """Worker 0 computes a prompt, of which each other worker has as many tokens as stated. Sources never send."""

    def __init__(self, *cached: int, gain: float = 0.2, **loads: Load) -> None:
        refs = [WorkerRef(f"w{row}", "i") for row in range(1 + len(cached))]
        workers = [Worker(ref, "a:1", "m", 2 * TOKENS, 9, LAYOUT) for ref in refs]
        self.table = LoadTable(workers)
        for ref in refs:
            self.table.set(ref, loads.get(ref.worker_id, Load(times=TIMES)))
        found = np.array([TOKENS, *cached], np.float64)
        directory: Any = SimpleNamespace(
            table=lambda model, fresh: self.table,
            distrusted=lambda ref: {},
            channel_of=lambda incarnation: object(),
        )
        prefixes: Any = SimpleNamespace(cached_tokens=lambda *_, pooled: found)
        sign: Any = None
        rule = FetchRule(gain, asyncio.get_running_loop().time)
        self.fetches = PrefixFetches(directory, prefixes, b"", sign, lambda *_: None, rule)
        self.decision: Any = SimpleNamespace(
            worker=workers[0], remote=False, decode_cached_tokens=0
        )

    async def run(self) -> tuple[str, float]:
        """The worker that was asked, or "", and how long the prompt has waited."""
        sampling = SimpleNamespace(HasField=lambda name: False)
        prepared = SimpleNamespace(
            model="m", images=(), adapter=None, sampling=sampling, cache_salt=""
        )
        request: Any = SimpleNamespace(prepared=prepared)
        record: Any = SimpleNamespace(fetches=[])
        loop, load = asyncio.get_running_loop(), object()
        start_s = loop.time()
        tokens = array("I", range(TOKENS))
        await self.fetches.fetch(request, tokens, self.decision, load, record)  # type: ignore[arg-type]
        return "".join(one[0] for one in record.fetches), loop.time() - start_s


@pytest.fixture(autouse=True)
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(self: Warming, *arguments: Any) -> None:
        await asyncio.sleep(arguments[3])
        raise DeadlineExceeded("as scripted")

    monkeypatch.setattr(Warming, "run", run)


@pytest.mark.parametrize(
    ("tokens", "waited_s"), [(96, FETCH_MIN_S), (1_024, 1_024 * TOKEN_S), (7_936, FETCH_S)]
)
async def test_a_frozen_source_delays_a_prompt_for_as_long_as_computing_it_takes(
    tokens: int, waited_s: float
) -> None:
    source, seconds = await Fetching(tokens).run()
    assert source == "w1"
    assert seconds == pytest.approx(waited_s)


async def test_without_times_and_without_a_rule_the_bound_is_the_longest_time() -> None:
    assert (await Fetching(1_024, gain=0.0).run())[1] == pytest.approx(FETCH_S)


async def test_the_source_is_the_usable_worker_with_most_of_the_prompt() -> None:
    unreachable, draining = Load(reachable=False, times=TIMES), Load(draining=True, times=TIMES)
    it = Fetching(2_048, 1_024, 4_096, 4_096, w3=unreachable, w4=draining)
    assert (await it.run())[0] == "w1"
    assert (await Fetching(4_096, w1=unreachable).run())[0] == ""


async def test_a_link_on_which_fetches_are_late_counts_as_slow() -> None:
    it = Fetching(1_024)
    waited_s = []
    for _ in range(5):
        waited_s.append((await it.run())[1])
        # The pause after a failure.
        await asyncio.sleep(31)
    assert [round(one, 3) for one in waited_s] == [0.512, 0.512, 0.512, 0, 0]

"""vLLM engines that are stuck while their services run. Streams continue elsewhere with equal tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_cli.members import member_rows
from tests.freezing import freeze, thaw
from tests.suite.deployment import Suite, greedy, suite
from tests.suite.slow_process import Delays
from tests.vllm.conftest import on_services
from tests.waiting import until

MODEL = Path("models/tiny-llama")
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
VLLM: dict[str, Any] = {
    "engine": "vllm",
    "model": str(MODEL),
    "prefill_count": 0,
    "decode_count": 2,
    "settings": (("decode", "dtype", "float32"),),
}
ANSWERED_S = 60.0
pytestmark = on_services(MODEL)


def requests(tokens: int) -> list[inference_pb2.GenerateRequest]:
    return [
        greedy([(7 * n + 13 * at) % 400 + 8 for at in range(60 + n)], tokens, LOCAL)
        for n in range(4)
    ]


def children_of(process_id: int) -> list[int]:
    """All children: each thread has its own."""
    files = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def command_of(process_id: int) -> str:
    return Path(f"/proc/{process_id}/cmdline").read_text()


@contextmanager
def frozen_rank(it: Suite, name: str) -> Iterator[None]:
    """Stops one rank. The service and vLLM's scheduler run on."""
    (engine,) = filter(children_of, children_of(it.child(name).process.pid))
    ranks = [one for one in children_of(engine) if "resource_tracker" not in command_of(one)]
    assert len(ranks) == 2
    freeze(max(ranks))
    try:
        yield
    finally:
        thaw(max(ranks))


@contextmanager
def stopped_step(delays: Delays, name: str) -> Iterator[None]:
    delays.set(**{f"step.{name}": 1.0})
    try:
        yield
    finally:
        delays.set()


@pytest.mark.parametrize("fault", ["rank", "step"])
async def test_streams_leave_a_worker_with_a_stuck_engine(tmp_path: Path, fault: str) -> None:
    # The step of two ranks on two cores takes a tenth of a second.
    tokens = 100 if fault == "rank" else 700
    delays = Delays(tmp_path / "delays")
    delays.folder.mkdir()
    async with suite(
        tmp_path,
        **VLLM,
        decode_tensor_parallel=2 if fault == "rank" else 1,
        spawning=lambda spawn: delays.spawning(spawn, "decode"),
    ) as it:
        undisturbed = await asyncio.gather(*(it.ask(one, 150) for one in requests(tokens)))
        running = await it.begun(requests(tokens), timeout_s=150, started_tokens=12)
        victim, survivor = await it.busier("decode-0", "decode-1")
        stopping = frozen_rank(it, victim) if fault == "rank" else stopped_step(delays, victim)
        start_s = time.monotonic()
        with stopping:
            await it.until(victim, lambda status: status.HasField("stall"), ANSWERED_S)
            noticed_s = time.monotonic() - start_s
            disturbed = await asyncio.gather(*running)
            print(
                f"noticed after {noticed_s:.1f} s, answers after {time.monotonic() - start_s:.1f} s"
            )
            (state,) = [
                row.state
                for row in await member_rows(it.deployment.registry)
                if row.member.worker_id == victim
            ]
            assert state.startswith("stalled")
        for result, plain in zip(disturbed, undisturbed, strict=True):
            assert result.token_ids == plain.token_ids
        assert {one.last.timing.decode_worker_id for one in disturbed} == {survivor}
        assert max(one.last.timing.attempts for one in disturbed) == 2
        for name in (victim, survivor):
            await it.wait_empty(name, timeout_s=40)

        async def serves() -> bool:
            (outcome,) = await asyncio.gather(it.ask(greedy(list(range(8, 40)), 2, LOCAL), 60))
            return outcome.last.timing.decode_worker_id == victim

        await until(serves, ANSWERED_S)

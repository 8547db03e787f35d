"""Another client of an attacked deployment: it streams answers and records when their tokens arrive."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.inference.v1 import inference_pb2_grpc
from tests.security.text_model import CONTEXT_TOKENS, write_text_model
from tests.suite.deployment import DEADLINE_S, Suite, greedy, prompt_of, suite
from tests.waiting import until

KEY = "the-key-of-the-bystander"
STRANGER_KEY = "the-key-of-the-stranger"
ROOT = Path(__file__).resolve().parents[2]
ANSWER_TOKENS = 100
# The suite sets this time of a decode step.
STEP_S = 0.01
_ATTACK_S = 90.0


@asynccontextmanager
async def attacked(folder: Path) -> AsyncIterator[Suite]:
    """A deployment with API keys and a real tokenizer in the router."""
    keys = folder / "keys"
    keys.write_text(f"{KEY} bystander\n{STRANGER_KEY} stranger\n")
    model = write_text_model(folder / "model")
    workers = f"sim:decode_step_s={STEP_S},context={CONTEXT_TOKENS}"
    settings = (
        ("router", "model", f"sim={model}"),
        ("router", "api_keys_file", str(keys)),
        ("prefill", "model", workers),
        ("decode", "model", workers),
    )
    async with suite(folder, settings=settings) as it:
        yield it


@dataclass(slots=True)
class Bystander:
    """Streams one answer after another, with its own key."""

    suite: Suite
    key: str
    arrivals_s: list[float] = field(default_factory=list)
    """When each message arrived, by `time.monotonic`."""
    answers: int = 0

    async def stream(self) -> None:
        """Checks every answer. Never returns."""
        stub: Any = inference_pb2_grpc.InferenceServiceStub(self.suite.channel)
        metadata = (("x-api-key", self.key),) if self.key else ()
        while True:
            prompt = prompt_of(40, self.answers)
            tokens: list[int] = []
            request = greedy(prompt, ANSWER_TOKENS)
            async for response in stub.Generate(request, metadata=metadata, timeout=DEADLINE_S):
                self.arrivals_s.append(time.monotonic())
                tokens += response.token_ids
            assert tuple(tokens) == self.suite.expected(prompt, ANSWER_TOKENS)
            self.answers += 1

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """The times between two messages in this period, longest last."""
        times = [start_s, *(at for at in self.arrivals_s if start_s <= at <= end_s), end_s]
        return sorted(later - earlier for earlier, later in itertools.pairwise(times))

    def report(self, what: str, start_s: float, end_s: float) -> None:
        """Prints the gaps of a period."""
        gaps = self.gaps_s(start_s, end_s)
        p99_ms, worst_ms = 1e3 * gaps[int(0.99 * (len(gaps) - 1))], 1e3 * gaps[-1]
        print(
            f"{what}: {end_s - start_s:.2f} s, {len(gaps) - 1} messages, gaps p99 {p99_ms:.0f} ms, "
            f"longest {worst_ms:.0f} ms"
        )


@asynccontextmanager
async def bystander(suite: Suite, key: str = "") -> AsyncIterator[Bystander]:
    """Streams while the body runs. It has streamed one answer before that, and every answer must be right."""
    client = Bystander(suite, key)
    streaming = asyncio.create_task(client.stream())

    async def wait_answers(count: int) -> None:
        await until(lambda: streaming.done() or client.answers >= count, DEADLINE_S)
        if streaming.done():
            streaming.result()

    try:
        await wait_answers(1)
        yield client
        await wait_answers(client.answers + 1)
    finally:
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)


async def attack(suite: Suite, name: str, key: str = "") -> Sequence[str]:
    """Runs an attack of `tests.security.attacker`. Returns the status of each call with its detail."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.security.attacker", suite.deployment.router, name, key),
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(_ATTACK_S):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()

"""A job: many mixed requests on one pair, a part of them aborted.

`python -m tests.vllm.soak [REQUESTS] [MODEL]` prints the result.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, dataclass, field
from random import Random

import psutil

from headrace_common.deadlines import Deadline
from headrace_engine.interface import DecodeTokens, DecodeWork, PrefillWork, Sampling
from headrace_kv.handoff.messages import Reservation
from headrace_kv.receive.receiver import TransferSummary
from tests.vllm.aborts import settled
from tests.vllm.pair import TIMEOUT_S, Pair, running_pair

SIDE_BY_SIDE = 6
BLOCK_COUNT = 64
LONGEST = 20
MEBIBYTE = 1 << 20
SAMPLES = 10


@dataclass(slots=True)
class SoakResult:
    """`start`, `end`: loads of both engines. `memory_mib`: by role, of every process, `SAMPLES` times."""

    requests: int
    aborted: int = 0
    remote: int = 0
    wrong: list[str] = field(default_factory=list)
    start: dict[str, dict[str, int]] = field(default_factory=dict)
    end: dict[str, dict[str, int]] = field(default_factory=dict)
    memory_mib: list[dict[str, int]] = field(default_factory=list)


class Soak:
    """Sends `requests` requests with known answers, in random order and ways."""

    def __init__(self, pair: Pair, requests: int) -> None:
        self.pair = pair
        self.result = SoakResult(requests)
        self._random = Random(5)
        beginning = [self._random.randrange(3, 500) for _ in range(200)]
        self._prompts = [
            beginning[: self._random.randrange(200)]
            + [self._random.randrange(3, 500) for _ in range(self._random.randrange(1, 250))]
            for _ in range(16)
        ]
        self._answers: list[list[int]] = []
        self._left = requests
        self._done = 0

    async def run(self) -> SoakResult:
        """Runs all requests."""
        pair, result = self.pair, self.result
        for prompt in self._prompts:
            answer = await pair.plain(prompt, Sampling(temperature=0.0, max_tokens=LONGEST))
            self._answers.append(answer.token_ids)
        await pair.reset()
        result.start = await self._loads()
        await asyncio.gather(*(self._ask_repeatedly() for _ in range(SIDE_BY_SIDE)))
        result.end = await self._loads()
        await pair.reset()
        return result

    async def _loads(self) -> dict[str, dict[str, int]]:
        pair = self.pair
        return {
            "prefill": asdict(await settled(pair.prefill)),
            "decode": asdict(await settled(pair.decode)),
        }

    async def _ask_repeatedly(self) -> None:
        while self._left:
            self._left -= 1
            await self._ask()
            self._done += 1
            if not self._done % (self.result.requests // SAMPLES):
                self.result.memory_mib.append(memory_mib())

    async def _ask(self) -> None:
        random, result = self._random, self.result
        number = random.randrange(len(self._prompts))
        remote = random.random() < 0.7
        patience_s = random.uniform(0, 0.3) if random.random() < 0.35 else TIMEOUT_S
        sampling = Sampling(temperature=0.0, max_tokens=random.randrange(1, LONGEST))
        asking = asyncio.create_task(self._answer(self._prompts[number], sampling, remote))
        await asyncio.wait({asking}, timeout=patience_s)
        asking.cancel()
        await asyncio.wait({asking})
        result.remote += remote
        if asking.cancelled():
            result.aborted += 1
        elif (error := asking.exception()) is not None:
            result.wrong.append(f"prompt {number}: {error!r}")
        elif asking.result() != self._answers[number][: sampling.max_tokens]:
            right = self._answers[number][: sampling.max_tokens]
            way = "handed over" if remote else "computed on decode"
            result.wrong.append(f"prompt {number}, {way}: {asking.result()}, not {right}")

    async def _answer(self, prompt: list[int], sampling: Sampling, remote: bool) -> list[int]:
        pair = self.pair
        work = DecodeWork(pair.new_transfer_id(), tuple(prompt), sampling, remote_kv=remote)
        tokens: list[int] = []
        arrival: asyncio.Task[TransferSummary] | None = None
        reported = False
        try:
            async for event in pair.decode.decode(work):
                if isinstance(event, DecodeTokens):
                    tokens.extend(event.token_ids)
                elif isinstance(event, Reservation) and event.start_token < event.end_token:
                    transfer = pair.receiver.reserve(event, Deadline.after(TIMEOUT_S))
                    arrival = asyncio.create_task(transfer.wait())
                    prefill = PrefillWork(tuple(prompt[:-1]), pair.target(event))
                    await pair.prefill.prefill(prefill)
                    await asyncio.wait({arrival})
                    arrival.result()
                    pair.decode.arrived(work.transfer_id)
                    reported = True
        finally:
            if arrival is not None and not reported:
                # As the decode service does: the blocks are freed once no sender writes any more.
                pair.receiver.cancel(work.transfer_id, "CANCELLED", "the client went away")
                await asyncio.wait({arrival})
                if arrival.exception() is None:
                    pair.decode.arrived(work.transfer_id)
        return tokens


def memory_mib() -> dict[str, int]:
    """Resident memory of this process and of the engines that it started, decode's first."""
    found = {"service": round(psutil.Process().memory_info().rss / MEBIBYTE)}
    engines = sorted(psutil.Process().children(), key=lambda child: child.create_time())
    for role, engine in zip(("decode", "prefill"), engines, strict=True):
        found[role] = round(engine.memory_info().rss / MEBIBYTE)
    return found


async def measure(model: str, requests: int) -> SoakResult:
    """Runs `requests` on a pair of the model's engines."""
    changes: dict[str, object] = {
        "model": model,
        "num_gpu_blocks_override": BLOCK_COUNT,
        "max_model_len": 1024,
        "max_num_batched_tokens": 256,
    }
    async with running_pair(prefill=changes, decode=changes) as pair:
        return await Soak(pair, requests).run()


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    print(asyncio.run(measure(sys.argv[2] if len(sys.argv) > 2 else "models/tiny-llama", count)))

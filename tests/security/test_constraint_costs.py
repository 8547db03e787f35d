"""Constraints of one tenant that are costly to enforce delay no answer of another, with real vLLM engines."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import grpc.aio
import pytest

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.suite.deployment import Suite, greedy, suite

MODEL: Final = Path("models/tiny-llama")
KEYS: Final = {"bystander": "the-key-of-the-bystander", "stranger": "the-key-of-the-stranger"}
PERIOD_S: Final = 12.0
GAP_MAX_S: Final = 1.0
DEADLINE_S: Final = 60.0
LOCAL: Final = inference_pb2.PREFILL_PLACEMENT_LOCAL
_PATTERN: Final = "((a{1,200}){1,200}){1,200}"
_PATTERNS: Final = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "pattern": _PATTERN} for n in range(60)},
    "required": [f"p{n}" for n in range(60)],
}
# Each of them stalled a decode worker, or the constraints of others, for seconds to minutes.
ATTACKS: Final[dict[str, tuple[dict[str, str], ...]]] = {
    "grammar": ({"grammar": "root ::= ((([a-z]{1,1000}){1,1000}){1,1000}){1,1000}"},),
    "patterns": ({"json": json.dumps(_PATTERNS)},),
    "schemas": tuple(
        {"json": json.dumps({"enum": [f"{number}-{value:09}" for value in range(4_000)]})}
        for number in range(7)
    ),
    "multiples": tuple(
        {"json": json.dumps({"type": "integer", "multipleOf": 999_983 + 2 * number})}
        for number in range(32)
    ),
}
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(280),
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: make model"),
]


async def times_s(it: Suite, tenant: str, request: inference_pb2.GenerateRequest) -> list[float]:
    """When the request was sent, and when its messages arrived."""
    stub: Any = inference_pb2_grpc.InferenceServiceStub(it.channel)
    found = [time.monotonic()]
    metadata = (("x-api-key", KEYS[tenant]),)
    async for _ in stub.Generate(request, metadata=metadata, timeout=DEADLINE_S):
        found.append(time.monotonic())  # noqa: PERF401 - a failed request has no list
    return found


def constrained(number: int, **outputs: Any) -> inference_pb2.GenerateRequest:
    request = greedy([8 + number % 400, 9, 10], 24, LOCAL)
    request.sampling.structured_outputs.CopyFrom(sampling_pb2.StructuredOutputs(**outputs))
    return request


async def measured(it: Suite) -> tuple[list[float], list[float]]:
    """The gaps of the bystander's streams over a period, and the times until its choices begin, in order."""
    gaps_s: list[float] = []
    choices_s: list[float] = []
    end_s = time.monotonic() + PERIOD_S

    async def stream() -> None:
        while time.monotonic() < end_s:
            times = await times_s(it, "bystander", greedy([8, 9, 10], 200, LOCAL))
            gaps_s.extend(later - earlier for earlier, later in pairwise(times))

    async def choose() -> None:
        texts = sampling_pb2.Choice(texts=["yes, certainly", "no, never"])
        number = 0
        while time.monotonic() < end_s:
            number += 1
            times = await times_s(it, "bystander", constrained(number, choice=texts))
            choices_s.append(times[1] - times[0])
            await asyncio.sleep(0.1)

    await asyncio.gather(stream(), choose())
    return sorted(gaps_s), sorted(choices_s)


async def attack(it: Suite, constraints: tuple[dict[str, str], ...], ends: Counter[str]) -> None:
    """Sends each constraint again and again, all of them at once. Never returns."""

    async def ask(outputs: dict[str, str]) -> None:
        number = 0
        while True:
            number += 1
            try:
                await times_s(it, "stranger", constrained(number, **outputs))
                ends["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ends[error.code().name] += 1

    await asyncio.gather(*map(ask, constraints))


@pytest.mark.parametrize("name", ATTACKS)
async def test_costly_constraints_of_a_tenant_delay_no_other(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
    settings = (
        ("prefill", "dtype", "float32"),
        ("decode", "dtype", "float32"),
        ("router", "api_keys_file", str(keys)),
    )
    ends: Counter[str] = Counter()
    async with suite(
        tmp_path, engine="vllm", model=str(MODEL), settings=settings, prefill_count=0
    ) as it:
        await times_s(it, "bystander", constrained(0, choice=sampling_pb2.Choice(texts=["yes"])))
        quiet = await measured(it)
        attacking = asyncio.create_task(attack(it, ATTACKS[name], ends))
        during = await measured(it)
        attacking.cancel()
        await asyncio.gather(attacking, return_exceptions=True)
    with capsys.disabled():
        print()
        for what, (gaps_s, choices_s) in (("quiet", quiet), (f"{name} {dict(ends)}", during)):
            print(
                f"{what}: gaps p99 {1e3 * at(gaps_s, 0.99):.0f} ms, longest {1e3 * gaps_s[-1]:.0f} ms; "
                f"choices p50 {1e3 * at(choices_s, 0.5):.0f} ms, longest {1e3 * choices_s[-1]:.0f} ms"
            )
    assert ends
    for before_s, during_s in zip(quiet, during, strict=True):
        for share in (0.99, 1.0):
            assert at(during_s, share) <= max(GAP_MAX_S, 2 * at(before_s, share))


def at(values: list[float], share: float) -> float:
    """The percentile of sorted values."""
    return values[int(share * (len(values) - 1))]

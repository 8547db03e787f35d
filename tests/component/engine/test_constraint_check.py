"""A constraint is compiled within bounds before an engine gets it, and tenants take turns. With real processes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace_common.errors import DecodeFull, InvalidRequest
from headrace_engine.interface import StructuredOutputs
from headrace_engine.vllm.service.constraints import ConstraintCheck

pytest.importorskip("llguidance")

ENDLESS = StructuredOutputs("json", '{"type": "integer", "multipleOf": 999983}')
ENDLESS_AFTER_TOKENS = StructuredOutputs(
    "grammar", f"start: (<[151657]> | <|im_start|>) %json {ENDLESS.text}"
)
CHOICE = StructuredOutputs("choice", "", ("yes", "no"))


def enum(number: int) -> StructuredOutputs:
    """One that takes 20 ms and more."""
    values = [f"{number}-{value:08}" for value in range(4_500)]
    return StructuredOutputs("json", json.dumps({"enum": values, "title": "a" * number}))


@asynccontextmanager
async def opened(cpu_s: float = 0.3) -> AsyncIterator[ConstraintCheck]:
    check = ConstraintCheck(cpu_s)
    try:
        yield check
    finally:
        check.close()


async def test_constraints_of_every_kind_are_accepted() -> None:
    tag = {
        "triggers": ["<f"],
        "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    }
    async with opened() as check:
        for outputs in (
            CHOICE,
            StructuredOutputs("json_object"),
            StructuredOutputs("json", '{"properties": {"a": {"type": "string"}}}'),
            StructuredOutputs("regex", "[a-z]+"),
            StructuredOutputs("grammar", 'root ::= "a"'),
            StructuredOutputs("structural_tag", json.dumps(tag)),
            # The engine reports what is wrong with these.
            StructuredOutputs("regex", "(a"),
            StructuredOutputs("structural_tag", "{}"),
        ):
            await check.check(outputs, "aa")


@pytest.mark.parametrize("outputs", [ENDLESS, ENDLESS_AFTER_TOKENS], ids=["json", "grammar"])
async def test_a_constraint_beyond_the_bound_is_refused_and_the_next_is_compiled(
    outputs: StructuredOutputs,
) -> None:
    async with opened() as check:
        for _ in range(2):
            with pytest.raises(InvalidRequest) as caught:
                await check.check(outputs, "aa")
            (remedy,) = caught.value.violations.values()
            assert "more than 0.3 s to compile" in remedy
        await check.check(CHOICE, "aa")


async def test_a_known_constraint_is_not_compiled_again_but_each_tenant_has_its_own() -> None:
    async with opened() as check:
        await check.check(CHOICE, "aa")
        (process,) = check._idle
        process.kill()
        process.wait()
        await check.check(CHOICE, "aa")
        assert check._idle == [process]
        await check.check(CHOICE, "bb")
        assert check._idle != [process]


async def test_many_costly_constraints_of_a_tenant_delay_another_by_one_of_them() -> None:
    async with opened() as check:
        await check.check(StructuredOutputs("regex", "a"), "bb")
        flood = [asyncio.create_task(check.check(ENDLESS, "aa"))]
        for number in range(10):
            outputs = StructuredOutputs("json", json.dumps({"multipleOf": 999_983 + number}))
            flood.append(asyncio.create_task(check.check(outputs, "aa")))
        await asyncio.sleep(0.01)
        start_s = time.monotonic()
        await check.check(CHOICE, "bb")
        waited_s = time.monotonic() - start_s
        assert sum(task.done() for task in flood) <= 2
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
    assert waited_s < 3.0


async def test_a_tenant_waits_as_long_as_its_costly_constraint_took() -> None:
    async with opened(2.0) as check:
        await check.check(enum(1), "aa")
        start_s = time.monotonic()
        cost_s = check._ready_s.get("aa", 0.0) - asyncio.get_running_loop().time()
        await check.check(CHOICE, "aa")
        assert time.monotonic() - start_s >= cost_s


async def test_a_cancelled_check_leaves_no_answer_for_the_next() -> None:
    async with opened(1.0) as check:
        task = asyncio.create_task(check.check(ENDLESS, "aa"))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await check.check(CHOICE, "aa")


async def test_without_an_answer_the_request_can_be_tried_again() -> None:
    async with opened(0.0005) as check:
        with pytest.raises(DecodeFull):
            await check.check(CHOICE, "aa")

"""Moves that a drain or the load asks for, without workers: models and workers do not wait for each other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_common.errors import DecodeFull
from headrace_kv.layout import WorkerRef
from headrace_router.dispatch import moves
from headrace_router.dispatch.dispatcher import RunningAttempts
from headrace_router.dispatch.moves import Moves

TARGET = WorkerRef("target", "i")


class Answer:
    """Counts the looks at its worker."""

    generates = True

    def __init__(self, worker: str) -> None:
        self.looks = 0
        self.ref = WorkerRef(worker, "i")
        self.response: Any = Answer.__new__(Answer)
        self.request: Any = SimpleNamespace(prepared=SimpleNamespace(request_id="r"))

    @property
    def decode_worker(self) -> WorkerRef:
        self.looks += 1
        return self.ref


def moves_of(*answers: Answer) -> Moves:
    dispatcher: Any = SimpleNamespace(running=RunningAttempts(), workers=SimpleNamespace())
    for name, answer in enumerate(answers):
        dispatcher.running[name] = answer
    sign: Any = None
    return Moves(dispatcher, sign, lambda outcome, asker: None)


async def test_models_wait_neither_for_moves_nor_for_bugs_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = {name: ("late", Answer(name), TARGET) for name in ("slow", "b", "c")}
    moved: list[tuple[str, float]] = []
    loop = asyncio.get_running_loop()

    async def move(self: Moves, attempt: Any, asker: str, worker_id: str) -> None:
        moved.append((attempt.ref.worker_id, loop.time() - start_s))
        if attempt.ref.worker_id == "slow":
            await asyncio.sleep(32)
        raise DecodeFull("as scripted")

    monkeypatch.setattr(Moves, "move", move)
    monkeypatch.setattr(Moves, "_planned", lambda self, model: planned[model])
    it, start_s = moves_of(), loop.time()
    it.dispatcher.workers.decode_worker_counts = lambda: ["slow", "without a plan", "b", "c"]  # type: ignore[method-assign, assignment, return-value]
    balancing = asyncio.ensure_future(it.balance())
    await asyncio.sleep(2 * moves.PLANNED_S["late"])
    balancing.cancel()
    assert [name for name, _ in moved] == ["slow", "b", "c"]
    assert {round(at_s, 3) for _, at_s in moved} == {moves.PLANNED_S["late"] + moves.LOOK_S}


async def test_emptying_a_worker_looks_at_its_answers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    own, others = Answer("leaving"), [Answer("other") for _ in range(3)]
    it = moves_of(own, *others)
    it.dispatcher.workers.leaves = lambda ref: True  # type: ignore[method-assign]
    looks = [one.looks for one in others]

    async def move(self: Moves, attempt: Any, asker: str, worker_id: str) -> None:
        del self.dispatcher.running[0]

    monkeypatch.setattr(Moves, "move", move)
    it.worker_leaves(own.ref)
    await asyncio.sleep(1)
    assert not it.leaving
    assert [one.looks for one in others] == looks
    assert not it.dispatcher.running.of_worker(own.ref)
    left: list[Any] = [*it.dispatcher.running.of_worker(others[0].ref)]
    assert left == others


async def test_an_answer_rests_after_a_move_that_met_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def move(self: Moves, attempt: Any, asker: str, worker_id: str) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ZeroDivisionError("as scripted")
        del self.dispatcher.running[0]

    monkeypatch.setattr(Moves, "move", move)
    it = moves_of(own := Answer("leaving"))
    it.dispatcher.workers.leaves = lambda ref: True  # type: ignore[method-assign]
    it.worker_leaves(own.ref)
    await asyncio.sleep(5)
    assert (tries, it.leaving) == (2, set())


async def test_the_id_of_a_response_finds_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def move(self: Moves, attempt: Any, asker: str, worker_id: str) -> Any:
        return asker

    monkeypatch.setattr(Moves, "move", move)
    for name in ("r", "cmpl-r", "chatcmpl-r", "resp_r", "msg_r"):
        assert [*map(str, await moves_of(Answer("a")).move_request(name, ""))] == ["operator"]

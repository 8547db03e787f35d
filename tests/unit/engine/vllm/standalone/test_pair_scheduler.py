"""Requests of stock vLLM servers that wait, fetch, send or are held, and wrong parameters of clients."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, cast

import pytest

from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    ConfigError,
    DuplicateTransfer,
    HeadraceError,
    InvalidRequest,
    NotFound,
    QueueFull,
)
from headrace_engine.connector.step_plan import StepPlan, TokenRange
from headrace_engine.connector.step_planner import StepPlanner
from headrace_engine.connector.transfers import ReceiveParams, SendParams
from headrace_engine.vllm.settings import params_with, read_params
from headrace_engine.vllm.standalone.fetch_service import PendingFetch, PendingFetches
from headrace_engine.vllm.standalone.node import FetchPlan, require_all_tokens
from headrace_engine.vllm.standalone.pair_scheduler import PairScheduler, Prompt
from headrace_engine.vllm.standalone.params import (
    ConsumerParams,
    ProducerParams,
    prompt_digest,
    read_request,
)
from headrace_engine.vllm.standalone.settings import StandaloneSettings
from headrace_kv.layout import STATE, CacheGroup, KvLayout, Part, WorkerRef
from headrace_kv.messages import Reservation, TransferTarget
from headrace_kv.receive.receiver import TransferSummary

TOKENS = tuple(range(100, 170))
END = len(TOKENS) - 1
DECODE = WorkerRef("d", "2")
CONSUMES: dict[str, Any] = {
    "do_remote_prefill": True,
    "transfer_id": "x1",
    "remote_host": "h",
    "remote_port": "7730",
}
PRODUCES: dict[str, Any] = {"do_remote_decode": True, "transfer_id": "x1"}


class Node:
    """Records its calls."""

    ref = WorkerRef("p", "1")

    def __init__(self) -> None:
        self.pending_fetches = PendingFetches(limit=4)
        self.started: list[FetchPlan] = []
        self.cancelled: list[str] = []
        self.failed: list[tuple[str, str]] = []

    def start(self, on_whole: object, on_failed: object) -> str:
        return "h:7730"

    def start_fetch(self, plan: FetchPlan) -> None:
        self.started.append(plan)

    def cancel_fetch(self, transfer_id: str) -> None:
        self.cancelled.append(transfer_id)

    def fail_fetch(self, transfer_id: str, error: HeadraceError) -> None:
        self.failed.append((transfer_id, error.reason))


class Rig:
    """A scheduler with its peer and the fetches of other engines."""

    def __init__(self, **changes: Any) -> None:
        self.peer = Node()
        self.pending = self.peer.pending_fetches
        values = {"can_send": True, "can_receive": True, "kv_hold_timeout_s": 60.0} | changes
        self.scheduler = PairScheduler(cast("Any", self.peer), timeout_s=60.0, **values)
        self.planner = StepPlanner((), self.scheduler.reserved)
        self.scheduler.start(self.planner)

    def prepared(self, params: dict[str, Any] | None, request_id: str = "r") -> Prompt:
        """A request that may run now."""
        prompt = prompt_of(params, request_id)
        assert self.scheduler.prepare(prompt)
        return prompt

    def finish(
        self, prompt: Prompt, opened: bool = False, complete: bool = True
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.prompt_finished(
            prompt, ((4, 5, 6),), opened=opened, complete=complete
        )

    def plan(self) -> StepPlan:
        """What the next step sends and frees of the held prompts."""
        plan = StepPlan()
        self.scheduler.plan_held(plan)
        return plan


@pytest.fixture
def rig() -> Rig:
    return Rig()


def prompt_of(params: dict[str, Any] | None, request_id: str = "r") -> Prompt:
    return Prompt(request_id, TOKENS, (), dict(params) if params is not None else None)


def fetch_of(
    transfer_id: str = "x1", tokens: tuple[int, ...] = TOKENS, start: int = 0, *extras: str
) -> PendingFetch:
    end = len(tokens) - 1
    target = TransferTarget(transfer_id, DECODE, "h:1", start, end, 1e12)
    return PendingFetch(target, prompt_digest(tokens[:end], extras))


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"do_remote_decode": False}])
def test_requests_without_a_transfer_are_unchanged(rig: Rig, params: dict[str, Any] | None) -> None:
    prompt = rig.prepared(params)
    assert prompt.params == params
    assert rig.finish(prompt) == (False, None)
    assert rig.peer.cancelled == []


def test_a_consuming_request_gets_the_connectors_params_and_starts_a_fetch(rig: Rig) -> None:
    prompt = rig.prepared(CONSUMES)
    assert read_params(prompt.params) == ReceiveParams("x1")
    assert rig.scheduler.prepare(prompt), "asked again when there was no room"
    reservation = Reservation("x1", (7, 8), 32, END)
    rig.scheduler.reserved(reservation)
    (plan,) = rig.peer.started
    assert plan.reservation == reservation
    assert (plan.params.pair_address, plan.params.incarnation) == ("h:7730", "")
    assert plan.prompt_digest == prompt_digest(TOKENS[:END], ())
    rig.scheduler.transfer_whole(reservation, TransferSummary(1, 4096, 0, WorkerRef("p", "1"), 1))
    # For the last output.
    assert rig.finish(prompt) == (
        False,
        {"transfer_id": "x1", "transferred_tokens": END - 32, "payload_bytes": 4096},
    )


def test_an_aborted_request_cancels_its_fetch(rig: Rig) -> None:
    rig.finish(rig.prepared(CONSUMES))
    assert rig.peer.cancelled == ["x1"]


def test_a_producing_request_waits_for_its_fetch(rig: Rig) -> None:
    prompt = prompt_of(PRODUCES)
    assert not rig.scheduler.prepare(prompt)
    assert not rig.scheduler.prepare(prompt)
    fetch = fetch_of(start=32)
    rig.pending.add(fetch)
    assert rig.scheduler.prepare(prompt)
    assert read_params(prompt.params) == SendParams(fetch.target)
    assert rig.scheduler.prepare(prompt), "asked again when there was no room"
    assert rig.finish(prompt, opened=True) == (False, None)
    assert rig.peer.failed == []


@pytest.mark.parametrize("matched", [False, True])
def test_a_producing_request_that_ends_early_fails_its_fetch(rig: Rig, matched: bool) -> None:
    prompt = prompt_of(PRODUCES)
    if matched:
        rig.pending.add(fetch_of())
    assert rig.scheduler.prepare(prompt) is matched
    rig.finish(prompt)
    assert rig.peer.failed == [("x1", "CANCELLED")]
    with pytest.raises(NotFound, match="over"):
        rig.pending.add(fetch_of())


@pytest.mark.parametrize(
    "fetch",
    [
        fetch_of(tokens=(1, *TOKENS[1:])),
        fetch_of(tokens=(*TOKENS, 1, 2)),
        fetch_of("x1", TOKENS, 0, "adapter"),
    ],
)
def test_another_prompt_is_not_sent(rig: Rig, fetch: PendingFetch) -> None:
    rig.pending.add(fetch)
    assert read_params(rig.prepared(PRODUCES).params) is None
    assert rig.peer.failed == [("x1", "PROTOCOL_VIOLATION")]


def test_a_request_with_a_closed_transfer_is_computed(rig: Rig) -> None:
    prompt = prompt_of(PRODUCES)
    assert not rig.scheduler.prepare(prompt)
    rig.pending.close("x1", "decode needs nothing of it")
    assert rig.scheduler.prepare(prompt)
    assert read_params(prompt.params) is None


def test_no_request_waits_beyond_its_deadline(rig: Rig) -> None:
    rig.prepared(PRODUCES | {"deadline_unix_s": time.time() - 1})
    with pytest.raises(NotFound):
        rig.pending.add(fetch_of())


@pytest.mark.parametrize(
    "params",
    [params_with(ReceiveParams("x9")), {"headrace": {"SendParams": {"transfer_id": "x9"}}}],
)
def test_clients_cannot_set_the_connectors_own_params(rig: Rig, params: dict[str, Any]) -> None:
    assert rig.prepared(params).params == {}


def test_a_transfer_id_is_used_once(rig: Rig) -> None:
    first, second = rig.prepared(CONSUMES, "a"), rig.prepared(CONSUMES, "b")
    assert read_params(first.params) == ReceiveParams("x1")
    assert read_params(second.params) is None


@pytest.mark.parametrize(
    ("rig", "prompt"),
    [
        # Its role forbids the transfer.
        (Rig(can_send=False), prompt_of(PRODUCES)),
        (Rig(can_receive=False), prompt_of(CONSUMES)),
        # It has no tokens.
        (Rig(), Prompt("r", (), (), dict(CONSUMES))),
    ],
)
def test_a_request_that_cannot_be_transferred_is_computed(rig: Rig, prompt: Prompt) -> None:
    assert rig.scheduler.prepare(prompt)
    assert read_params(prompt.params) is None


def held_transfer(rig: Rig) -> str:
    """Holds the prompt of a request. Returns the transfer id that decode's client gets."""
    held, params = rig.finish(rig.prepared({"do_remote_decode": True}))
    assert held
    assert params is not None
    parsed = read_request(params, 60.0)
    assert isinstance(parsed, ConsumerParams)
    assert (parsed.pair_address, parsed.incarnation) == ("h:7730", "1")
    return parsed.transfer_id


def test_a_held_prompt_is_sent_when_it_is_fetched(rig: Rig) -> None:
    transfer_id = held_transfer(rig)
    assert rig.plan() == StepPlan()
    fetch = fetch_of(transfer_id, TOKENS, 32)
    rig.pending.add(fetch)
    plan = rig.plan()
    assert plan.opened == [fetch.target]
    assert plan.finished_sends == {"r": transfer_id}
    assert plan.ready == [TokenRange(transfer_id, 32, END, ((4, 5, 6),))]
    assert rig.plan() == StepPlan()


def test_a_held_prompt_is_freed_when_no_fetch_arrives_in_time() -> None:
    rig = Rig(kv_hold_timeout_s=0.0)
    transfer_id = held_transfer(rig)
    assert rig.plan() == StepPlan(finished_sends={"r": transfer_id})
    with pytest.raises(NotFound, match="deadline"):
        rig.pending.add(fetch_of(transfer_id))


def test_a_held_prompt_is_not_sent_to_a_fetch_of_another(rig: Rig) -> None:
    transfer_id = held_transfer(rig)
    rig.pending.add(fetch_of(transfer_id, (1, *TOKENS[1:])))
    assert rig.plan() == StepPlan(finished_sends={"r": transfer_id})
    assert rig.peer.failed == [(transfer_id, "PROTOCOL_VIOLATION")]


def test_an_incomplete_prompt_is_not_held(rig: Rig) -> None:
    prompt = rig.prepared({"do_remote_decode": True})
    assert rig.finish(prompt, complete=False) == (False, None)


def test_pending_fetches_are_bounded_and_matched_once() -> None:
    pending = PendingFetches(limit=2, remembered=2)
    pending.add(fetch_of("a"))
    with pytest.raises(DuplicateTransfer):
        pending.add(fetch_of("a"))
    pending.add(fetch_of("b"))
    with pytest.raises(QueueFull):
        pending.add(fetch_of("c"))
    assert pending.match("a") == fetch_of("a")
    assert pending.match("a") is None
    pending.close("b", "gone")
    assert pending.match("b") is None
    assert pending.close_reason("b") == "gone"
    assert not pending.close_expired("c", Deadline.after(10))


def test_deadlines_are_bounded() -> None:
    parsed = read_request(CONSUMES | {"deadline_unix_s": 1e15}, 60.0)
    assert isinstance(parsed, ConsumerParams)
    assert parsed.deadline.remaining_s() <= 60.0
    near = read_request(PRODUCES | {"deadline_unix_s": time.time() + 5}, 60.0)
    assert isinstance(near, ProducerParams)
    assert near.deadline.remaining_s() <= 5.0


def test_a_remaining_time_does_not_depend_on_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 9e9)
    near = read_request(PRODUCES | {"remaining_s": 5}, 60.0)
    assert isinstance(near, ProducerParams)
    assert 0.0 < near.deadline.remaining_s() <= 5.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"transfer_id": ""}, "transfer_id"),
        ({"transfer_id": 5}, "transfer_id"),
        ({"transfer_id": "x" * 200}, "transfer_id"),
        ({"remote_host": None}, "remote_host"),
        ({"remote_port": None}, "remote_port"),
        ({"remote_port": "-1"}, "remote_port"),
        ({"remote_port": 65_536}, "remote_port"),
        ({"deadline_unix_s": "now"}, "deadline_unix_s"),
        ({"deadline_unix_s": float("nan")}, "deadline_unix_s"),
        ({"remaining_s": "5"}, "remaining_s"),
        ({"do_remote_decode": True}, "do_remote_prefill"),
        ({"first_token": "hidden"}, "first_token"),
    ],
)
def test_wrong_parameters_are_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(CONSUMES | change, 60.0)
    assert field in caught.value.violations


def test_all_wrong_settings_are_named() -> None:
    wrong = {
        "listen": "nowhere",
        "kv_hold_timeout_s": 0,
        "lease_ttl_s": "5",
        "transport": "x",
        "liste": "y",
    }
    with pytest.raises(ConfigError) as caught:
        StandaloneSettings.read(wrong, "both")
    assert set(caught.value.metadata) == set(wrong)


def test_only_prefill_has_a_default_port() -> None:
    assert StandaloneSettings.read({}, "prefill").listen == "127.0.0.1:7730"
    assert StandaloneSettings.read({}, "both").listen == "127.0.0.1:7730"
    assert StandaloneSettings.read({}, "decode").listen == "127.0.0.1:0"
    advertised = StandaloneSettings.read(
        {"listen": "0.0.0.0:7730", "advertise": "10.0.0.5:0"}, "prefill"
    )
    assert advertised.host == "10.0.0.5"


def test_states_and_windows_are_rejected_by_name() -> None:
    attention = KvLayout.attention(
        model="m:1",
        dtype="float32",
        layer_count=1,
        kv_head_count=4,
        block_tokens=32,
        parts={"kv": 4096},
    )
    require_all_tokens(attention)
    state = CacheGroup("conv", (1,), STATE, 1, 0, (Part("conv", "float32", 64),))
    with pytest.raises(ConfigError, match="conv"):
        require_all_tokens(replace(attention, groups=(*attention.groups, state)))
    window = replace(attention.groups[0], name="window", window_tokens=64)
    with pytest.raises(ConfigError, match="window"):
        require_all_tokens(replace(attention, groups=(*attention.groups, window)))

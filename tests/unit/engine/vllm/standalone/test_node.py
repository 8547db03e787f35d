"""Pairing without services: who waits, who sends, who is held, and what clients may not say."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

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
from headrace_engine.vllm.settings import ReceiveParams, incoming_params, read_params
from headrace_engine.vllm.standalone.fetch_client import FetchPlan
from headrace_engine.vllm.standalone.node import require_no_states
from headrace_engine.vllm.standalone.pair_scheduler import PairScheduler, Prompt
from headrace_engine.vllm.standalone.params import (
    ConsumerParams,
    ProducerParams,
    prompt_digest,
    read_request,
)
from headrace_engine.vllm.standalone.pending_fetches import Offer, PendingFetches
from headrace_engine.vllm.standalone.settings import StandaloneSettings
from headrace_engine.vllm.step.plan import StepPlan
from headrace_kv.handoff.messages import Reservation, TransferTarget
from headrace_kv.layout.layout import STATE, CacheGroup, KvLayout, Part, WorkerRef
from headrace_kv.receive.receiver import TransferSummary

TOKENS = tuple(range(100, 170))
END = len(TOKENS) - 1
DECODE = WorkerRef("d", "2")
FETCHES: dict[str, Any] = {
    "do_remote_prefill": True,
    "transfer_id": "x1",
    "remote_host": "h",
    "remote_port": "7730",
}
SENDS: dict[str, Any] = {"do_remote_decode": True, "transfer_id": "x1"}


class Peer:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.begun: list[FetchPlan] = []
        self.given_up: list[str] = []
        self.failed: list[tuple[str, str]] = []

    def begin(self, wanted: FetchPlan) -> None:
        self.begun.append(wanted)

    def give_up(self, transfer_id: str) -> None:
        self.given_up.append(transfer_id)

    def fail_fetch(self, transfer_id: str, error: HeadraceError) -> None:
        self.failed.append((transfer_id, error.reason))


class Side:
    """A scheduler with its neighbours."""

    def __init__(
        self, *, can_send: bool = True, can_receive: bool = True, kv_hold_timeout_s: float = 60.0
    ):
        self.peer = Peer()
        self.offers = PendingFetches(limit=4)
        self.scheduler = PairScheduler(
            ref=WorkerRef("p", "1"),
            endpoint="h:7730",
            offers=self.offers,
            peer=self.peer,
            can_send=can_send,
            can_receive=can_receive,
            timeout_s=60.0,
            kv_hold_timeout_s=kv_hold_timeout_s,
        )

    def finish(self, prompt: Prompt, opened: bool = False) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(prompt, ((4, 5, 6),), opened=opened, complete=True)


def prompt_of(params: dict[str, Any] | None, request_id: str = "r", *extras: str) -> Prompt:
    return Prompt(request_id, TOKENS, extras, dict(params) if params is not None else None)


def offer_of(
    transfer_id: str = "x1", tokens: tuple[int, ...] = TOKENS, start: int = 0, *extras: str
) -> Offer:
    end = len(tokens) - 1
    target = TransferTarget(transfer_id, DECODE, "h:1", start, end, 1e12)
    return Offer(target, prompt_digest(tokens[:end], extras))


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"do_remote_decode": False}])
def test_requests_that_ask_for_nothing_are_left_alone(params: dict[str, Any] | None) -> None:
    side = Side()
    prompt = prompt_of(params)
    assert side.scheduler.prepare(prompt)
    assert prompt.params == params
    assert side.finish(prompt) == (False, None)
    assert side.peer.given_up == []


def test_a_fetching_request_gets_the_connectors_words_and_a_digest() -> None:
    side = Side()
    prompt = prompt_of(FETCHES)
    assert side.scheduler.prepare(prompt)
    assert read_params(prompt.params) == ReceiveParams("x1")
    assert side.scheduler.prepare(prompt), "asked again when there was no room"
    reservation = Reservation("x1", (7, 8), 32, END)
    side.scheduler.reserved(reservation)
    (wanted,) = side.peer.begun
    assert wanted.reservation == reservation
    assert (wanted.fetches.source, wanted.fetches.incarnation) == ("h:7730", "")
    assert wanted.prompt_digest == prompt_digest(TOKENS[:END], ())


def test_the_last_output_says_what_was_transferred() -> None:
    side = Side()
    prompt = prompt_of(FETCHES)
    side.scheduler.prepare(prompt)
    side.scheduler.reserved(Reservation("x1", (7, 8), 32, END))
    side.scheduler.note_whole("x1", TransferSummary(1, 4096, 0, WorkerRef("p", "1"), 1, 2))
    held, params = side.finish(prompt)
    assert not held
    assert params == {
        "transfer_id": "x1",
        "transferred_tokens": END - 32,
        "payload_bytes": 4096,
    }


def test_an_aborted_fetch_is_given_up() -> None:
    side = Side()
    prompt = prompt_of(FETCHES)
    side.scheduler.prepare(prompt)
    side.finish(prompt)
    assert side.peer.given_up == ["x1"]


def test_a_sending_request_waits_for_its_fetch() -> None:
    side = Side()
    prompt = prompt_of(SENDS)
    assert not side.scheduler.prepare(prompt)
    assert not side.scheduler.prepare(prompt)
    offer = offer_of(start=32)
    side.offers.offer(offer)
    assert side.scheduler.prepare(prompt)
    assert read_params(prompt.params) == offer.target
    assert side.scheduler.prepare(prompt), "asked again when there was no room"
    assert side.finish(prompt, opened=True) == (False, None)
    assert side.peer.failed == []


def test_the_fetch_may_come_first() -> None:
    side = Side()
    side.offers.offer(offer_of())
    assert side.scheduler.prepare(prompt_of(SENDS))


@pytest.mark.parametrize("taken", [False, True])
def test_a_sending_request_that_ends_early_fails_its_fetch(taken: bool) -> None:
    side = Side()
    prompt = prompt_of(SENDS)
    if taken:
        side.offers.offer(offer_of())
    assert side.scheduler.prepare(prompt) is taken
    side.finish(prompt)
    assert side.peer.failed == [("x1", "CANCELLED")]
    with pytest.raises(NotFound, match="over"):
        side.offers.offer(offer_of())


@pytest.mark.parametrize(
    "offer",
    [
        offer_of(tokens=(1, *TOKENS[1:])),
        offer_of(tokens=(*TOKENS, 1, 2)),
        offer_of("x1", TOKENS, 0, "adapter"),
    ],
)
def test_another_prompt_is_not_sent(offer: Offer) -> None:
    side = Side()
    side.offers.offer(offer)
    prompt = prompt_of(SENDS)
    assert side.scheduler.prepare(prompt)
    assert read_params(prompt.params) is None
    assert side.peer.failed == [("x1", "PROTOCOL_VIOLATION")]


def test_a_request_whose_fetch_is_over_is_computed() -> None:
    side = Side()
    prompt = prompt_of(SENDS)
    assert not side.scheduler.prepare(prompt)
    side.offers.end("x1", "decode needs nothing of it")
    assert side.scheduler.prepare(prompt)
    assert read_params(prompt.params) is None


def test_nobody_waits_beyond_the_deadline() -> None:
    side = Side()
    assert side.scheduler.prepare(prompt_of(SENDS | {"deadline_unix_s": time.time() - 1}))
    with pytest.raises(NotFound):
        side.offers.offer(offer_of())


def test_clients_cannot_use_the_connectors_own_words() -> None:
    side = Side()
    target = TransferTarget("x9", DECODE, "evil:1", 0, END, 1e12)
    outgoing = {"headrace": {"outgoing": {"transfer_id": target.transfer_id}}}
    for params in (incoming_params("x9"), outgoing):
        prompt = prompt_of(params)
        assert side.scheduler.prepare(prompt)
        assert prompt.params == {}


def test_a_transfer_id_counts_once() -> None:
    side = Side()
    first, second = prompt_of(FETCHES, "a"), prompt_of(FETCHES, "b")
    assert side.scheduler.prepare(first)
    assert side.scheduler.prepare(second)
    assert read_params(first.params) == ReceiveParams("x1")
    assert read_params(second.params) is None


@pytest.mark.parametrize(
    ("side", "params"),
    [(Side(can_send=False), SENDS), (Side(can_receive=False), FETCHES)],
)
def test_a_role_that_cannot_is_no_reason_to_fail(side: Side, params: dict[str, Any]) -> None:
    prompt = prompt_of(params)
    assert side.scheduler.prepare(prompt)
    assert read_params(prompt.params) is None


def test_prompts_without_tokens_are_computed() -> None:
    side = Side()
    prompt = Prompt("r", (), (), dict(FETCHES))
    assert side.scheduler.prepare(prompt)
    assert read_params(prompt.params) is None


def held_transfer(side: Side) -> tuple[Prompt, str]:
    prompt = prompt_of({"do_remote_decode": True})
    assert side.scheduler.prepare(prompt)
    held, params = side.finish(prompt)
    assert held
    assert params is not None
    said = read_request(params, 60.0)
    assert isinstance(said, ConsumerParams)
    assert (said.source, said.incarnation) == ("h:7730", "1")
    return prompt, said.transfer_id


def test_a_held_prompt_is_sent_when_it_is_fetched() -> None:
    side = Side()
    _, transfer_id = held_transfer(side)
    plan = StepPlan()
    side.scheduler.add_held(plan)
    assert plan == StepPlan()
    offer = offer_of(transfer_id, TOKENS, 32)
    side.offers.offer(offer)
    side.scheduler.add_held(plan)
    assert plan.opened == [offer.target]
    assert plan.finished_sends == {"r": transfer_id}
    (span,) = plan.ready
    assert (span.transfer_id, span.start_token, span.end_token) == (transfer_id, 32, END)
    assert span.block_ids == ((4, 5, 6),)
    again = StepPlan()
    side.scheduler.add_held(again)
    assert again == StepPlan()


def test_a_held_prompt_is_let_go_when_nobody_fetches_it() -> None:
    side = Side(kv_hold_timeout_s=0.001)
    _, transfer_id = held_transfer(side)
    time.sleep(0.01)
    plan = StepPlan()
    side.scheduler.add_held(plan)
    assert plan.finished_sends == {"r": transfer_id}
    assert plan.opened == []
    with pytest.raises(NotFound, match="deadline"):
        side.offers.offer(offer_of(transfer_id))


def test_a_held_prompt_is_not_sent_for_another() -> None:
    side = Side()
    _, transfer_id = held_transfer(side)
    side.offers.offer(offer_of(transfer_id, (1, *TOKENS[1:])))
    plan = StepPlan()
    side.scheduler.add_held(plan)
    assert plan.opened == []
    assert plan.finished_sends == {"r": transfer_id}
    assert side.peer.failed == [(transfer_id, "PROTOCOL_VIOLATION")]


def test_an_incomplete_prompt_is_not_held() -> None:
    side = Side()
    prompt = prompt_of({"do_remote_decode": True})
    side.scheduler.prepare(prompt)
    assert side.scheduler.finished(prompt, ((4,),), opened=False, complete=False) == (False, None)


def test_offers_are_bounded_and_given_out_once() -> None:
    offers = PendingFetches(limit=2, remembered=2)
    offers.offer(offer_of("a"))
    with pytest.raises(DuplicateTransfer):
        offers.offer(offer_of("a"))
    offers.offer(offer_of("b"))
    with pytest.raises(QueueFull):
        offers.offer(offer_of("c"))
    assert offers.take("a") == offer_of("a")
    assert offers.take("a") is None
    assert offers.end("b", "gone")
    assert offers.why_over("b") == "gone"
    assert not offers.expired(Deadline.after(10), "c")


def test_deadlines_are_bounded() -> None:
    said = read_request(FETCHES | {"deadline_unix_s": 1e15}, 60.0)
    assert isinstance(said, ConsumerParams)
    assert said.deadline.remaining_s() <= 60.0
    near = read_request(SENDS | {"deadline_unix_s": time.time() + 5}, 60.0)
    assert isinstance(near, ProducerParams)
    assert near.deadline.remaining_s() <= 5.0


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
        ({"do_remote_decode": True}, "do_remote_prefill"),
        ({"first_token": "logits"}, "first_token"),
    ],
)
def test_wrong_parameters_are_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_request(FETCHES | change, 60.0)
    assert field in caught.value.violations


def test_settings_name_all_that_is_wrong() -> None:
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


def test_only_prefill_has_a_port_of_its_own() -> None:
    assert StandaloneSettings.read({}, "prefill").listen == "127.0.0.1:7730"
    assert StandaloneSettings.read({}, "both").listen == "127.0.0.1:7730"
    assert StandaloneSettings.read({}, "decode").listen == "127.0.0.1:0"
    advertised = StandaloneSettings.read(
        {"listen": "0.0.0.0:7730", "advertise": "10.0.0.5:0"}, "prefill"
    )
    assert advertised.host == "10.0.0.5"


def test_states_are_refused_by_name() -> None:
    attention = KvLayout.attention(
        model="m:1",
        dtype="float32",
        layer_count=1,
        kv_head_count=4,
        block_tokens=32,
        parts={"kv": 4096},
    )
    require_no_states(attention)
    state = CacheGroup("conv", (1,), STATE, 1, 0, (Part("conv", "float32", 64),))
    with pytest.raises(ConfigError, match="conv"):
        require_no_states(replace(attention, groups=(*attention.groups, state)))

"""The scheduler's view of pairing: which requests wait, fetch, send or are held. Knows no vLLM types."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InvalidRequest,
    ProtocolViolation,
)
from headrace_common.identity import new_transfer_id
from headrace_engine.vllm.settings import PARAMS_KEY, incoming_params, outgoing_params
from headrace_engine.vllm.standalone.fetch_client import FetchPlan
from headrace_engine.vllm.standalone.params import (
    ConsumerParams,
    ProducerParams,
    clear_request,
    held_params,
    prompt_digest,
    read_request,
)
from headrace_engine.vllm.standalone.pending_fetches import Offer, PendingFetches
from headrace_engine.vllm.step.plan import StepPlan, TokenSpan
from headrace_kv.handoff.messages import Reservation
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.receive.receiver import TransferSummary

log = logging.getLogger(__name__)

SEEN_MAX = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request, as far as pairing goes. `extras` are what decides its KV cache beside the tokens.

    `params` is vLLM's own mapping, which is changed in place; `token_ids` is empty for a prompt without tokens.
    """

    request_id: str
    token_ids: Sequence[int]
    extras: tuple[str, ...]
    params: MutableMapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class _Held:
    request_id: str
    prompt: Prompt
    block_ids: tuple[tuple[int, ...], ...]
    deadline: Deadline


@dataclass(slots=True)
class _Receiving:
    transfer_id: str
    reservation: Reservation | None = None
    summary: TransferSummary | None = None


class PairPeer(Protocol):
    """What the scheduler tells its event loop; nothing here blocks."""

    def begin(self, wanted: FetchPlan) -> None: ...

    def give_up(self, transfer_id: str) -> None: ...

    def fail_fetch(self, transfer_id: str, error: HeadraceError) -> None: ...


class PairScheduler:
    """Called on the engine's scheduling thread, except `note_whole`, which any thread may call."""

    def __init__(
        self,
        *,
        ref: WorkerRef,
        endpoint: str,
        offers: PendingFetches,
        peer: PairPeer,
        can_send: bool,
        can_receive: bool,
        timeout_s: float,
        kv_hold_timeout_s: float,
    ) -> None:
        self._ref = ref
        self._endpoint = endpoint
        self._offers = offers
        self._peer = peer
        self._can_send = can_send
        self._can_receive = can_receive
        self._timeout_s = timeout_s
        self._kv_hold_timeout_s = kv_hold_timeout_s
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._fetching: dict[str, tuple[ConsumerParams, Prompt]] = {}
        self._receiving: dict[str, _Receiving] = {}
        self._waiting: dict[str, ProducerParams] = {}
        self._sending: dict[str, str] = {}
        self._minting: set[str] = set()
        self._held: dict[str, _Held] = {}

    def prepare(self, prompt: Prompt) -> bool:
        """Puts the request into the connector's own words. False while it must wait for a Fetch.

        A request that asks for what cannot be is computed here: nothing may go wrong on this thread (I6).
        """
        if prompt.params is not None and not self._knows(prompt.request_id):
            # Written here only: clients must not say where memory is written to.
            prompt.params.pop(PARAMS_KEY, None)
        waiting = self._waiting.get(prompt.request_id)
        try:
            said = waiting or read_request(prompt.params, self._timeout_s)
            if said is None or prompt.request_id in self._minting:
                return True
            if isinstance(said, ConsumerParams):
                self._fetch(prompt, said)
            else:
                return self._send(prompt, said)
        except HeadraceError as exc:
            log.warning("%s is computed here: %s", prompt.request_id, exc.detail)
            clear_request(prompt.params)
        return True

    def _knows(self, request_id: str) -> bool:
        return request_id in self._receiving or request_id in self._sending

    def _fetch(self, prompt: Prompt, said: ConsumerParams) -> None:
        if not self._can_receive:
            raise InvalidRequest({"do_remote_prefill": "needs kv_role kv_consumer or kv_both"})
        self._require_new(prompt, said.transfer_id)
        clear_request(prompt.params)
        self._fetching[said.transfer_id] = (said, prompt)
        self._receiving[prompt.request_id] = _Receiving(said.transfer_id)
        assert prompt.params is not None
        prompt.params.update(incoming_params(said.transfer_id))

    def _send(self, prompt: Prompt, said: ProducerParams) -> bool:
        if prompt.request_id not in self._waiting:
            if not self._can_send:
                raise InvalidRequest({"do_remote_decode": "needs kv_role kv_producer or kv_both"})
            if not said.transfer_id:
                self._minting.add(prompt.request_id)
                return True
            self._require_new(prompt, said.transfer_id)
            self._waiting[prompt.request_id] = said
        offer = self._offers.take(said.transfer_id)
        if offer is not None:
            del self._waiting[prompt.request_id]
            clear_request(prompt.params)
            self._check(prompt, offer)
            assert prompt.params is not None
            prompt.params.update(outgoing_params(offer.target))
            self._sending[prompt.request_id] = said.transfer_id
            return True
        if self._offers.expired(said.deadline, said.transfer_id) or self._offers.why_over(
            said.transfer_id
        ):
            del self._waiting[prompt.request_id]
            why = self._offers.why_over(said.transfer_id)
            raise Cancelled(f"transfer {said.transfer_id} is over: {why}")
        return False

    def _require_new(self, prompt: Prompt, transfer_id: str) -> None:
        if not prompt.token_ids:
            raise InvalidRequest({"prompt": "must be tokens or text to be handed over"})
        if transfer_id in self._seen:
            raise InvalidRequest({"transfer_id": f"{transfer_id} was used before"})
        self._seen[transfer_id] = None
        while len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)

    def _check(self, prompt: Prompt, offer: Offer) -> None:
        """Raises ProtocolViolation, and fails the Fetch, when decode means another prompt."""
        end = offer.target.end_token
        if end <= len(prompt.token_ids) and offer.prompt_digest == prompt_digest(
            prompt.token_ids[:end], prompt.extras
        ):
            return
        transfer_id = offer.target.transfer_id
        error = ProtocolViolation(
            f"transfer {transfer_id} is of another prompt here: send both requests with equal prompts",
            metadata={"transfer_id": transfer_id},
        )
        self._peer.fail_fetch(transfer_id, error)
        raise error

    def reserved(self, reservation: Reservation) -> None:
        """The connector's scheduler has blocks for a transfer; empty when nothing is missing."""
        said, prompt = self._fetching.pop(reservation.transfer_id)
        receiving = self._receiving.get(prompt.request_id)
        if receiving is not None:
            receiving.reservation = reservation
        digest = prompt_digest(prompt.token_ids[: reservation.end_token], prompt.extras)
        self._peer.begin(FetchPlan(reservation, said, digest))

    def note_whole(self, transfer_id: str, summary: TransferSummary) -> None:
        """A transfer's KV cache is there. Told to the client in the request's last output."""
        for receiving in list(self._receiving.values()):
            if receiving.transfer_id == transfer_id:
                receiving.summary = summary

    def finished(
        self,
        prompt: Prompt,
        block_ids: tuple[tuple[int, ...], ...],
        *,
        opened: bool,
        complete: bool,
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request is over: whether its blocks stay, and kv_transfer_params of its last output.

        `block_ids` are by group of the layout, in token order from token 0.

        `opened`: whether its transfer had begun. `complete`: whether its prompt's KV cache is whole.
        """
        request_id = prompt.request_id
        receiving = self._receiving.pop(request_id, None)
        if receiving is not None:
            return False, self._stop_receiving(receiving)
        waiting = self._waiting.pop(request_id, None)
        transfer_id = waiting.transfer_id if waiting is not None else ""
        if not opened:
            transfer_id = transfer_id or self._sending.get(request_id, "")
        self._sending.pop(request_id, None)
        if transfer_id:
            self._offers.end(transfer_id, "its request has ended")
            self._peer.fail_fetch(transfer_id, Cancelled("the prompt's request has ended"))
        if request_id in self._minting:
            self._minting.discard(request_id)
            if complete and len(prompt.token_ids) > 1:
                return True, self._hold(prompt, block_ids)
        return False, None

    def _stop_receiving(self, receiving: _Receiving) -> dict[str, Any]:
        self._fetching.pop(receiving.transfer_id, None)
        self._peer.give_up(receiving.transfer_id)
        summary = receiving.summary
        reservation = receiving.reservation
        tokens = 0
        if summary is not None and reservation is not None:
            tokens = reservation.end_token - reservation.start_token
        return {
            "transfer_id": receiving.transfer_id,
            "transferred_tokens": tokens,
            "payload_bytes": summary.payload_bytes if summary is not None else 0,
        }

    def _hold(self, prompt: Prompt, block_ids: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
        transfer_id = new_transfer_id()
        self._held[transfer_id] = _Held(
            prompt.request_id, prompt, block_ids, Deadline.after(self._kv_hold_timeout_s)
        )
        return held_params(transfer_id, self._ref, self._endpoint)

    def add_held(self, plan: StepPlan) -> None:
        """Puts what is fetched of held prompts into a step's plan, and lets go of what nobody fetches."""
        for transfer_id, held in list(self._held.items()):
            offer = self._offers.take(transfer_id)
            over = self._offers.expired(held.deadline, transfer_id) or self._offers.why_over(
                transfer_id
            )
            if offer is None and not over:
                continue
            del self._held[transfer_id]
            plan.finished_sends[held.request_id] = transfer_id
            if offer is not None:
                self._open_held(plan, held, offer)

    def _open_held(self, plan: StepPlan, held: _Held, offer: Offer) -> None:
        try:
            self._check(held.prompt, offer)
        except ProtocolViolation as exc:
            log.warning("%s", exc.detail)
            return
        target = offer.target
        plan.opened.append(target)
        plan.ready.append(
            TokenSpan(target.transfer_id, target.start_token, target.end_token, held.block_ids)
        )

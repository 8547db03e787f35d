"""Which requests of a stock vLLM server wait, fetch, send or are held."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_common.deadlines import Deadline
from headrace_common.errors import (
    Cancelled,
    HeadraceError,
    InvalidRequest,
    ProtocolViolation,
)
from headrace_common.identity import new_transfer_id
from headrace_common.tasks import Recent
from headrace_engine.connector.step_plan import StepPlan, TokenRange
from headrace_engine.connector.step_planner import StepPlanner
from headrace_engine.connector.transfers import PrefillTimes, ReceiveParams, SendParams
from headrace_engine.vllm.model_folder import digest_of_adapter
from headrace_engine.vllm.scheduler.connector_scheduler import Peers
from headrace_engine.vllm.settings import PARAMS_KEY, params_with
from headrace_engine.vllm.standalone.fetch_service import PendingFetch
from headrace_engine.vllm.standalone.node import FetchPlan, StandaloneNode
from headrace_engine.vllm.standalone.params import (
    ConsumerParams,
    ProducerParams,
    clear_request,
    held_params,
    prompt_digest,
    read_request,
)
from headrace_kv.messages import Reservation
from headrace_kv.receive.receiver import TransferSummary

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

SEEN_MAX = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt. `extras` are all that determines its KV cache beside the tokens.

    `token_ids` is empty for a prompt without tokens. `params` is vLLM's own mapping, which is changed in place.
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


class PairScheduler(Peers):
    """Requests name their peers in kv_transfer_params. The scheduling thread calls it.

    Any thread may call `transfer_whole`.
    """

    def __init__(
        self,
        node: StandaloneNode,
        *,
        can_send: bool,
        can_receive: bool,
        timeout_s: float,
        kv_hold_timeout_s: float,
    ) -> None:
        self._node = node
        self._endpoint = ""
        self._can_send = can_send
        self._can_receive = can_receive
        self._pending = node.pending_fetches
        self._timeout_s = timeout_s
        self._kv_hold_timeout_s = kv_hold_timeout_s
        self._seen: Recent[str, None] = Recent(SEEN_MAX)
        self._fetching: dict[str, tuple[ConsumerParams, Prompt]] = {}
        # By request: the kv_transfer_params of its last output.
        self._receiving: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, ProducerParams] = {}
        self._sending: dict[str, str] = {}
        self._to_hold: set[str] = set()
        self._held: dict[str, _Held] = {}

    def start(self, planner: StepPlanner) -> None:
        """Returns once all ranks have attached."""
        self._planner = planner
        self._endpoint = self._node.start(
            self.transfer_whole, lambda failed_id: planner.transfer_settled(failed_id, whole=False)
        )

    def may_schedule(self, request: Request, cached_tokens: int) -> bool:
        return self.prepare(prompt_of(request))

    def step_planned(self, output: SchedulerOutput, plan: StepPlan) -> None:
        self.plan_held(plan)

    def request_finished(
        self,
        request: Request,
        block_ids: tuple[tuple[int, ...], ...],
        times: PrefillTimes | None,
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.prompt_finished(
            prompt_of(request), block_ids, opened=times is not None, complete=is_complete(request)
        )

    def close(self) -> None:
        self._node.close()

    def prepare(self, prompt: Prompt) -> bool:
        """Replaces the request's parameters by those of the connector. False while it must wait for a Fetch.

        A request with wrong parameters is computed here: an error must not end this thread (I6).
        """
        if prompt.params is not None and not self._knows(prompt.request_id):
            # Only this scheduler sets it: a client must not choose where memory is written to.
            prompt.params.pop(PARAMS_KEY, None)
        waiting = self._waiting.get(prompt.request_id)
        try:
            params = waiting or read_request(prompt.params, self._timeout_s)
            if params is None or prompt.request_id in self._to_hold:
                return True
            if isinstance(params, ConsumerParams):
                self._receive(prompt, params)
            else:
                return self._send(prompt, params)
        except HeadraceError as exc:
            log.warning("%s is computed here: %s", prompt.request_id, exc.detail)
            clear_request(prompt.params)
        return True

    def _knows(self, request_id: str) -> bool:
        return request_id in self._receiving or request_id in self._sending

    def _receive(self, prompt: Prompt, params: ConsumerParams) -> None:
        if not self._can_receive:
            raise InvalidRequest({"do_remote_prefill": "needs kv_role kv_consumer or kv_both"})
        self._require_new(prompt, params.transfer_id)
        clear_request(prompt.params)
        self._fetching[params.transfer_id] = (params, prompt)
        self._receiving[prompt.request_id] = {
            "transfer_id": params.transfer_id,
            "transferred_tokens": 0,
            "payload_bytes": 0,
        }
        assert prompt.params is not None
        prompt.params.update(params_with(ReceiveParams(params.transfer_id)))

    def _send(self, prompt: Prompt, params: ProducerParams) -> bool:
        transfer_id = params.transfer_id
        if prompt.request_id not in self._waiting:
            if not self._can_send:
                raise InvalidRequest({"do_remote_decode": "needs kv_role kv_producer or kv_both"})
            if not transfer_id:
                self._to_hold.add(prompt.request_id)
                return True
            self._require_new(prompt, transfer_id)
            self._waiting[prompt.request_id] = params
        fetch = self._pending.match(transfer_id)
        if fetch is not None:
            del self._waiting[prompt.request_id]
            clear_request(prompt.params)
            self._require_same_prompt(prompt, fetch)
            assert prompt.params is not None
            prompt.params.update(params_with(SendParams(fetch.target)))
            self._sending[prompt.request_id] = transfer_id
            return True
        why = self._pending.close_expired(transfer_id, params.deadline)
        if why:
            del self._waiting[prompt.request_id]
            raise Cancelled(f"transfer {transfer_id} is over: {why}")
        return False

    def _require_new(self, prompt: Prompt, transfer_id: str) -> None:
        if not prompt.token_ids:
            raise InvalidRequest({"prompt": "must be tokens or text to be handed over"})
        if transfer_id in self._seen:
            raise InvalidRequest({"transfer_id": f"{transfer_id} was used before"})
        self._seen[transfer_id] = None

    def _require_same_prompt(self, prompt: Prompt, fetch: PendingFetch) -> None:
        """Raises ProtocolViolation, and fails the Fetch, when decode has another prompt."""
        end = fetch.target.end_token
        if end <= len(prompt.token_ids) and fetch.prompt_digest == prompt_digest(
            prompt.token_ids[:end], prompt.extras
        ):
            return
        transfer_id = fetch.target.transfer_id
        error = ProtocolViolation(
            f"transfer {transfer_id} is of another prompt here: send both requests with equal prompts",
            metadata={"transfer_id": transfer_id},
        )
        self._node.fail_fetch(transfer_id, error)
        raise error

    def reserved(self, reservation: Reservation) -> None:
        """The connector's scheduler has blocks for a transfer. The reservation is empty when nothing is missing."""
        params, prompt = self._fetching.pop(reservation.transfer_id)
        digest = prompt_digest(prompt.token_ids[: reservation.end_token], prompt.extras)
        self._node.start_fetch(FetchPlan(reservation, params, digest))

    def transfer_whole(self, reservation: Reservation, summary: TransferSummary) -> None:
        """A transfer's KV cache has arrived. The request's last output states it."""
        tokens = reservation.end_token - reservation.start_token
        for params in list(self._receiving.values()):
            if params["transfer_id"] == reservation.transfer_id:
                params.update(transferred_tokens=tokens, payload_bytes=summary.payload_bytes)
        self._planner.transfer_settled(reservation.transfer_id, whole=True)

    def prompt_finished(
        self,
        prompt: Prompt,
        block_ids: tuple[tuple[int, ...], ...],
        *,
        opened: bool,
        complete: bool,
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. Returns whether its blocks must stay, and kv_transfer_params of its last output.

        `block_ids` are by group of the layout, in token order from token 0. `opened`: whether its transfer was opened.
        `complete`: whether the cache holds its whole prompt.
        """
        request_id = prompt.request_id
        receiving = self._receiving.pop(request_id, None)
        if receiving is not None:
            self._fetching.pop(receiving["transfer_id"], None)
            self._node.cancel_fetch(receiving["transfer_id"])
            return False, receiving
        waiting = self._waiting.pop(request_id, None)
        transfer_id = waiting.transfer_id if waiting is not None else ""
        if not opened:
            transfer_id = transfer_id or self._sending.get(request_id, "")
        self._sending.pop(request_id, None)
        if transfer_id:
            self._pending.close(transfer_id, "its request has ended")
            self._node.fail_fetch(transfer_id, Cancelled("the prompt's request has ended"))
        if request_id in self._to_hold:
            self._to_hold.discard(request_id)
            if complete and len(prompt.token_ids) > 1:
                return True, self._hold(prompt, block_ids)
        return False, None

    def _hold(self, prompt: Prompt, block_ids: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
        transfer_id = new_transfer_id()
        self._held[transfer_id] = _Held(
            prompt.request_id, prompt, block_ids, Deadline.after(self._kv_hold_timeout_s)
        )
        return held_params(transfer_id, self._node.ref, self._endpoint)

    def plan_held(self, plan: StepPlan) -> None:
        """Adds held prompts that are fetched to a step's plan, and frees those that no engine has fetched in time."""
        for transfer_id, held in list(self._held.items()):
            fetch = self._pending.match(transfer_id)
            if fetch is None and not self._pending.close_expired(transfer_id, held.deadline):
                continue
            del self._held[transfer_id]
            plan.free_after_send(held.request_id, transfer_id)
            if fetch is not None:
                self._send_held(plan, held, fetch)

    def _send_held(self, plan: StepPlan, held: _Held, fetch: PendingFetch) -> None:
        try:
            self._require_same_prompt(held.prompt, fetch)
        except ProtocolViolation as exc:
            log.warning("%s", exc.detail)
            return
        target = fetch.target
        plan.send_computed(
            target,
            TokenRange(target.transfer_id, target.start_token, target.end_token, held.block_ids),
        )


def prompt_of(request: Request) -> Prompt:
    """The request's prompt. One that is not made of tokens has none here, and is not transferred."""
    adapter = request.lora_request
    return Prompt(
        request_id=request.request_id,
        token_ids=() if request.prompt_embeds is not None else request.prompt_token_ids or (),
        extras=(
            _identity_of(adapter.lora_name, adapter.lora_path) if adapter is not None else "",
            *(feature.identifier for feature in request.mm_features),
        ),
        params=request.kv_transfer_params,
    )


def _identity_of(name: str, path: str) -> str:
    """Adapters of one name differ when their files do. Without files in a folder, the name of the download counts."""
    try:
        return f"adapter {name} {digest_of_adapter(Path(path))}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"adapter {name} {path}"


def is_complete(request: Request) -> bool:
    """Whether the request has ended by itself, so that its whole prompt is in the cache."""
    from vllm.v1.request import RequestStatus

    ended = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
    return request.status in ended and request.num_computed_tokens >= request.num_prompt_tokens

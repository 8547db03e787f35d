"""The scheduler's side: which blocks a transfer fills or leaves from, and when vLLM may go on. Knows no vLLM types."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_engine.vllm.scheduler.overlapped_requests import OverlappedRequests
from headrace_engine.vllm.settings import (
    PrefillTimes,
    ReceiveParams,
    consume_params,
    read_params,
)
from headrace_engine.vllm.step.groups import LayerGroup, token_stride
from headrace_engine.vllm.step.plan import StepPlan, TokenSpan
from headrace_kv.handoff.messages import Reservation, TransferTarget
from headrace_kv.layout.layout import STATE, TOKENS

# While all requests wait for their KV, vLLM steps on without end, and a new request waits for the end of such a step:
# it is a long one only where requests are announced, and there is none that is still on its way.
SHORT_STEP_S = 0.005
LONG_STEP_S = 0.1
ON_ITS_WAY_S = 0.2


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request's part of a step: computes [computed_tokens, computed_tokens + step_tokens).

    `block_ids`, by group of vLLM, replace the known ones when `replaces_blocks`, else they are appended. They are empty
    when there is nothing new.
    """

    request_id: str
    computed_tokens: int
    step_tokens: int
    block_ids: Sequence[Sequence[int]]
    replaces_blocks: bool


@dataclass(slots=True)
class _Receive:
    """`go_on` takes the first token of a request that awaits it; None once it has it, or of one that does not.

    `nearly_until_s`: the transfer's end, in Unix time, once all but its last layers are there; 0 before that, and of a
    request that was given up.
    """

    request_id: str
    block_ids: tuple[int, ...]
    go_on: Callable[[int], None] | None
    whole: bool = False
    nearly_until_s: float = 0.0
    given_up: bool = False


@dataclass(slots=True)
class _Send:
    target: TransferTarget
    handed_tokens: int
    cached_tokens: int = 0
    start_unix_ns: int = 0
    overrun: bool = False
    block_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def opened(self) -> bool:
        return self.start_unix_ns > 0


class ConnectorScheduler:
    """Called on the engine's scheduling thread, except `settle`, `arriving`, `first_token` and `request_coming`, which
    any thread may call.

    `late` are requests that began before the last layers of their KV were there. `on_reserved` gets the blocks of every
    incoming transfer, an empty Reservation when nothing is missing.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], on_reserved: Callable[[Reservation], None]
    ) -> None:
        self._groups = tuple(groups)
        self._token_stride = token_stride(groups)
        self._has_states = any(group.kind == STATE for group in groups)
        self._on_reserved = on_reserved
        self._sends: dict[str, _Send] = {}
        self._receives: dict[str, _Receive] = {}
        self._settled: deque[tuple[str, bool]] = deque()
        self._arriving: deque[tuple[str, float]] = deque()
        self.late = OverlappedRequests()
        self._first_tokens: deque[tuple[str, int]] = deque()
        self._finished_sends: dict[str, str] = {}
        self._news = threading.Event()
        self._coming_until_s = -math.inf

    def missing_tokens(
        self, params: MutableMapping[str, Any] | None, known_tokens: int, cached_tokens: int
    ) -> int:
        """Tokens after the cached ones that come over the data plane. The last one that is known is computed here."""
        said = read_params(params)
        if not isinstance(said, ReceiveParams):
            return 0
        return max(0, _end_token(said, known_tokens) - cached_tokens)

    def allocated(
        self,
        request_id: str,
        params: MutableMapping[str, Any] | None,
        block_ids: Sequence[Sequence[int]],
        known_tokens: int,
        missing_tokens: int,
        go_on: Callable[[int], None],
    ) -> None:
        """The request has blocks, by group of vLLM, for the tokens known of it; `go_on` adds another one."""
        said = consume_params(params)
        if isinstance(said, TransferTarget):
            self._sends[request_id] = _Send(said, handed_tokens=said.start_token)
        elif said is not None:
            end = _end_token(said, known_tokens)
            start = end - missing_tokens
            first, *further = (
                group.blocks_between(block_ids[group.index], start, end) if missing_tokens else ()
                for group in self._groups
            )
            if missing_tokens:
                self._receives[said.transfer_id] = _Receive(
                    request_id, first, go_on if said.awaits_first_token else None
                )
            self._on_reserved(Reservation(said.transfer_id, first, start, end, tuple(further)))

    def in_layout_order(self, block_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """A request's blocks by group of the layout, from those by group of vLLM."""
        return tuple(tuple(block_ids[group.index]) for group in self._groups)

    def settle(self, transfer_id: str, whole: bool) -> None:
        """An incoming transfer is over: nothing writes into its blocks any more."""
        self._settled.append((transfer_id, whole))
        self._news.set()

    def arriving(self, transfer_id: str, deadline_unix_s: float) -> None:
        """All but the last layers of an incoming transfer are there, on all ranks."""
        self._arriving.append((transfer_id, deadline_unix_s))
        self._news.set()

    def first_token(self, transfer_id: str, token_id: int) -> None:
        """What a request goes on after that awaits it."""
        self._first_tokens.append((transfer_id, token_id))
        self._news.set()

    def request_coming(self) -> None:
        """A request will be there any moment."""
        self._coming_until_s = time.monotonic() + ON_ITS_WAY_S
        self._news.set()

    def wait_for_news(self, timeout_s: float) -> None:
        """Before a step that computes nothing: returns once an incoming transfer has news, or none is awaited."""
        if self._receives or self.late:
            is_coming = time.monotonic() < self._coming_until_s
            self._news.wait(min(timeout_s, SHORT_STEP_S) if is_coming else timeout_s)

    def plan_step(
        self, scheduled: Iterable[ScheduledRequest], preempted_request_ids: Iterable[str]
    ) -> StepPlan:
        """What the ranks must know before the step."""
        self._news.clear()
        plan = StepPlan(finished_sends=self._finished_sends)
        self._finished_sends = {}
        for request_id in preempted_request_ids:
            send = self._sends.pop(request_id, None)
            if send is not None and send.opened:
                plan.preempted.append(send.target.transfer_id)
        scheduled = tuple(scheduled)
        for request in scheduled:
            send = self._sends.get(request.request_id)
            if send is not None:
                self._plan_send(plan, send, request)
        self._plan_receives(plan)
        self.late.plan(plan, (request.request_id for request in scheduled))
        return plan

    def _plan_receives(self, plan: StepPlan) -> None:
        """Lets requests run whose transfer is whole, or nearly, and that await nothing else."""
        while self._settled:
            transfer_id, whole = self._settled.popleft()
            receive = self._receives.get(transfer_id)
            if receive is None:
                self.late.settle(plan, transfer_id, whole)
            elif whole:
                receive.whole = True
                self._plan_received(plan, transfer_id, receive)
            else:
                del self._receives[transfer_id]
                plan.failed.append(receive.request_id)
        while self._arriving:
            transfer_id, deadline_unix_s = self._arriving.popleft()
            receive = self._receives.get(transfer_id)
            if receive is not None and not receive.given_up:
                receive.nearly_until_s = deadline_unix_s
                self._plan_received(plan, transfer_id, receive)
        while self._first_tokens:
            transfer_id, token_id = self._first_tokens.popleft()
            receive = self._receives.get(transfer_id)
            if receive is not None and receive.go_on is not None:
                receive.go_on(token_id)
                receive.go_on = None
                self._plan_received(plan, transfer_id, receive)

    def _plan_received(self, plan: StepPlan, transfer_id: str, receive: _Receive) -> None:
        if receive.go_on is not None or not (receive.whole or receive.nearly_until_s):
            return
        del self._receives[transfer_id]
        plan.received.append(receive.request_id)
        if not receive.whole:
            self.late.begin(
                transfer_id, receive.request_id, receive.block_ids, receive.nearly_until_s
            )

    def _plan_send(self, plan: StepPlan, send: _Send, request: ScheduledRequest) -> None:
        if request.replaces_blocks:
            send.block_ids.clear()
        for index, block_ids in enumerate(request.block_ids):
            send.block_ids[index].extend(block_ids)
        if not send.opened:
            send.start_unix_ns = time.time_ns()
            send.cached_tokens = request.computed_tokens
            plan.opened.append(send.target)
        known_tokens = request.computed_tokens + request.step_tokens
        if self._has_states and known_tokens > send.target.end_token:
            # A state is overwritten by the next one: what is under way or still to come would be another's.
            if not send.overrun:
                plan.overrun.append(send.target.transfer_id)
            send.overrun = True
            return
        # What vLLM found in its prefix cache, too: it may be what another request of this very step is to compute.
        self._hand_over(plan, send, known_tokens)
        if send.target.with_logits and known_tokens >= send.target.end_token:
            plan.final.append(send.target.transfer_id)

    def _hand_over(self, plan: StepPlan, send: _Send, known_tokens: int) -> None:
        """Adds the tokens up to `known_tokens` that are not handed over yet, whole blocks only but for the last."""
        end = send.target.end_token
        is_last = known_tokens >= end
        if not is_last:
            stride = self._token_stride
            end = known_tokens - known_tokens % stride if stride else send.handed_tokens
        if end > send.handed_tokens:
            blocks = tuple(self._source_blocks(send, group, is_last) for group in self._groups)
            plan.computed.append(
                TokenSpan(send.target.transfer_id, send.handed_tokens, end, blocks)
            )
            send.handed_tokens = end

    def _source_blocks(self, send: _Send, group: LayerGroup, is_last: bool) -> tuple[int, ...]:
        block_ids = send.block_ids[group.index]
        if group.kind == TOKENS:
            return tuple(block_ids)
        end = send.target.end_token
        return group.blocks_between(block_ids, end - 1, end) if is_last else ()

    def finished(self, request_id: str) -> PrefillTimes | None:
        """The request is over. When it was sending, its blocks stay until the ranks say that they are quiet."""
        for transfer_id, receive in self._receives.items():
            if receive.request_id == request_id:
                # Given up: it awaits no token any more, only that nobody writes.
                receive.go_on = None
                receive.given_up, receive.nearly_until_s = True, 0.0
                if receive.whole:
                    self._settled.append((transfer_id, True))
        send = self._sends.pop(request_id, None)
        if send is None or not send.opened:
            return None
        self._finished_sends[request_id] = send.target.transfer_id
        return PrefillTimes(send.cached_tokens, send.start_unix_ns, time.time_ns())


def _end_token(incoming: ReceiveParams, known_tokens: int) -> int:
    """One past the last token that is transferred."""
    return known_tokens if incoming.awaits_first_token else known_tokens - 1

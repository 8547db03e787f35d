"""Plans what each engine step does for transfers, and when requests may run. Uses no vLLM types."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain

from headrace_engine.connector.layer_groups import LayerGroup, token_stride
from headrace_engine.connector.step_plan import StepPlan, TokenRange
from headrace_engine.connector.transfers import (
    BlockHolds,
    PartialReceives,
    PrefillTimes,
    Receive,
    ReceiveParams,
    ScheduledRequest,
    Send,
    SendParams,
)
from headrace_kv.layout import STATE, TOKENS
from headrace_kv.messages import Reservation

# While all requests wait for their KV, vLLM runs empty steps in a loop, and a new request is only
# scheduled after the current one. A long step is used only where requests are announced, and none is on its way.
SHORT_STEP_S = 0.005
LONG_STEP_S = 0.1
ANNOUNCEMENT_S = 0.2


class StepPlanner:
    """The scheduling thread calls it. Any thread may call the `transfer_...`, `first_token_...` and
    `request_announced` methods.

    `on_reserved` gets the blocks of every incoming transfer, or an empty Reservation when nothing is missing. `holds`:
    blocks that transfers need longer than requests. `partial`: transfers of requests that run before they are whole.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], on_reserved: Callable[[Reservation], None]
    ) -> None:
        self._groups = tuple(groups)
        self._token_stride = token_stride(groups)
        self._has_states = any(group.kind == STATE for group in groups)
        self._has_windows = any(group.is_windowed for group in groups)
        self._on_reserved = on_reserved
        self._sends: dict[str, Send] = {}
        self._receives: dict[str, Receive] = {}
        self._settled: deque[tuple[str, bool]] = deque()
        self._first_tokens: deque[tuple[str, int]] = deque()
        self._begun: deque[str] = deque()
        self._late: deque[str] = deque()
        self._plan = StepPlan()
        self._takes_received = False
        self._event = threading.Event()
        self._announced_until_s = -math.inf
        self.holds = BlockHolds()
        self.partial = PartialReceives(self.holds)

    def missing_tokens(
        self, params: ReceiveParams | SendParams | None, known_tokens: int, cached_tokens: int
    ) -> int:
        """Number of tokens after the cached ones that a transfer brings. The engine computes the last known one."""
        if isinstance(params, ReceiveParams):
            return max(0, _end_token(params, known_tokens) - cached_tokens)
        prefix = None if params is None else params.prefix
        return 0 if prefix is None else prefix.missing_tokens(cached_tokens)

    def blocks_allocated(
        self,
        request_id: str,
        params: ReceiveParams | SendParams | None,
        block_ids: Sequence[Sequence[int]],
        known_tokens: int,
        missing_tokens: int,
        add_token: Callable[[int], None],
    ) -> None:
        """The request has blocks, by group of vLLM, for its `known_tokens`. `add_token` appends another token to it.

        A request has its `params` once: after a preemption or a failed transfer, it computes all tokens here.
        """
        if isinstance(params, SendParams):
            target, prefix = params.target, params.prefix
            self._sends[request_id] = Send(target, target.start_token, params.cached_only)
            if prefix is not None and missing_tokens:
                name, end = prefix.transfer_id, prefix.end_token
                reservation = self._reservation(name, block_ids, end, missing_tokens)
                self._receives[name] = Receive(request_id, reservation)
                self._on_reserved(reservation)
        elif params is not None:
            end = _end_token(params, known_tokens)
            reservation = self._reservation(params.transfer_id, block_ids, end, missing_tokens)
            if missing_tokens:
                awaited = add_token if params.awaits_first_token else None
                self._receives[params.transfer_id] = Receive(request_id, reservation, awaited)
            self._on_reserved(reservation)

    def _reservation(
        self,
        transfer_id: str,
        block_ids: Sequence[Sequence[int]],
        end_token: int,
        missing_tokens: int,
    ) -> Reservation:
        start = end_token - missing_tokens
        first, *further = (
            group.blocks_between(block_ids[group.index], start, end_token) if missing_tokens else ()
            for group in self._groups
        )
        return Reservation(transfer_id, first, start, end_token, tuple(further))

    def send_before_running(self, request_id: str, send: Callable[[str, int], int]) -> None:
        """Opens a request's transfer with the next step, if `send` has something to send then.

        `send` gets the transfer and its first token. It returns one past the last token that it sends.
        """
        found = self._sends.get(request_id)
        if found is None or found.opened:
            return
        target, start = found.target, found.planned_tokens
        end = send(target.transfer_id, start)
        if end > start:
            found.open()
            found.plan_until(end)
            self._plan.opened.append(target)

    def in_layout_order(self, block_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """A request's blocks by group of the layout, from those by group of vLLM."""
        return tuple(tuple(block_ids[group.index]) for group in self._groups)

    def transfer_settled(self, transfer_id: str, whole: bool) -> None:
        """An incoming transfer has ended: no sender writes into its blocks any more."""
        self._settled.append((transfer_id, whole))
        self._event.set()

    def transfer_late(self, transfer_id: str) -> None:
        """The request of a transfer computes in other blocks. These are held until the transfer has settled."""
        self._late.append(transfer_id)
        self._event.set()

    def first_token_received(self, transfer_id: str, token_id: int) -> None:
        """The first token of a request that awaits it."""
        self._first_tokens.append((transfer_id, token_id))
        self._event.set()

    def layers_arrived(self, transfer_id: str) -> None:
        """The first layers of a transfer are whole. Repeats are ignored."""
        self._begun.append(transfer_id)
        self._event.set()

    def request_announced(self) -> None:
        """A request reaches the scheduler within a moment."""
        self._announced_until_s = time.monotonic() + ANNOUNCEMENT_S
        self._event.set()

    @property
    def sending(self) -> Collection[str]:
        """The requests with KV for another worker."""
        return self._sends.keys()

    def wait_for_event(self, timeout_s: float) -> None:
        """Before a step that computes nothing: returns once something is known of a transfer.

        Returns at once when no transfer is awaited, and none holds blocks, or the next plan has something.
        """
        if (self._receives or self.holds) and self._plan == StepPlan():
            is_announced = time.monotonic() < self._announced_until_s
            self._event.wait(min(timeout_s, SHORT_STEP_S) if is_announced else timeout_s)

    def plan_step(
        self,
        scheduled: Iterable[ScheduledRequest],
        preempted_request_ids: Iterable[str],
        written: Callable[[ScheduledRequest], Iterable[int]] = lambda request: (),
    ) -> StepPlan:
        """The plan that the ranks need before the step.

        `written` gives the blocks into which the step writes KV of a request.
        """
        plan, self._plan = self._plan, StepPlan()
        for request_id in preempted_request_ids:
            send = self._sends.pop(request_id, None)
            if send is not None and send.opened:
                plan.preempted.append(send.target.transfer_id)
        scheduled = tuple(scheduled)
        for request in scheduled:
            send = self._sends.get(request.request_id)
            if send is not None and send.cached_only:
                others = (one for one in scheduled if one is not request)
                self._plan_cached(plan, send, request, (written(one) for one in others))
            elif send is not None:
                self._plan_send(plan, send, request)
        plan.awaited.extend(self.partial.awaited)
        # What comes after `take_received` is taken before the next step, unless this one computes nothing.
        if not (scheduled and self._takes_received):
            self._plan_receives(plan)
        return plan

    def take_received(self, waits: Callable[[str], bool]) -> list[str]:
        """Before a step is scheduled: requests that may run in it, because their incoming transfer is whole.

        Those that `waits` names wait for something else, and are in the step's plan.
        """
        self._takes_received = True
        self._plan_receives(self._plan)
        received = [one for one in self._plan.received if not waits(one)]
        self._plan.run_received(received)
        return received

    def _plan_receives(self, plan: StepPlan) -> None:
        """Lets requests run that wait for nothing any more."""
        self._event.clear()
        while self._settled:
            transfer_id, whole = self._settled.popleft()
            receive = self._receives.get(transfer_id)
            if receive is None:
                plan.completed.extend(self.partial.settle(transfer_id, whole))
            elif whole:
                receive.arrive()
                self._plan_received(plan, transfer_id, receive)
            else:
                del self._receives[transfer_id]
                plan.failed.append(receive.request_id)
        while self._begun:
            transfer_id = self._begun.popleft()
            receive = self._receives.get(transfer_id)
            if receive is not None and not receive.ended:
                del self._receives[transfer_id]
                self.partial.add(transfer_id, receive)
                plan.begun.append(receive.request_id)
                self._plan_run(plan, receive)
        while self._late:
            transfer_id = self._late.popleft()
            receive = self._receives.pop(transfer_id, None)
            if receive is not None:
                self.holds.hold(transfer_id, receive.reservation.block_ids_by_group)
                plan.failed.append(receive.request_id)
        while self._first_tokens:
            transfer_id, token_id = self._first_tokens.popleft()
            receive = self._receives.get(transfer_id)
            if receive is not None:
                receive.add_first_token(token_id)
                self._plan_received(plan, transfer_id, receive)

    def _plan_received(self, plan: StepPlan, transfer_id: str, receive: Receive) -> None:
        if not receive.ready:
            return
        del self._receives[transfer_id]
        self._plan_run(plan, receive)

    def _plan_run(self, plan: StepPlan, receive: Receive) -> None:
        plan.received.append(receive.request_id)
        send = self._sends.get(receive.request_id)
        if send is not None:
            send.prefix_fetched(receive.token_count)

    def _plan_send(self, plan: StepPlan, send: Send, request: ScheduledRequest) -> None:
        send.take_part(request)
        if not send.opened:
            send.open()
            plan.opened.append(send.target)
        known_tokens = request.computed_tokens + request.step_tokens
        if self._overruns(send.target.end_token, request.computed_tokens, known_tokens):
            if not send.overrun:
                plan.overrun.append(send.target.transfer_id)
            send.mark_overrun()
            return
        # Tokens that vLLM found in its prefix cache count as computed by this step: another request of the same step
        # may be the one that computes them.
        self._plan_tokens(plan, send, known_tokens)
        if send.target.with_hidden_state and known_tokens >= send.target.end_token:
            plan.send_hidden_state(request.request_id, send.target.transfer_id)

    def _plan_cached(
        self,
        plan: StepPlan,
        send: Send,
        request: ScheduledRequest,
        written: Iterable[Iterable[int]],
    ) -> None:
        """Sends tokens that earlier steps have computed, without the layer hooks, which graphs of decode leave out.

        The request computes the token after them only. It may have found blocks that others write in this step.
        """
        send.take_part(request)
        target = send.target
        if send.opened:
            return
        send.open()
        blocks = tuple(tuple(send.block_ids[group.index]) for group in self._groups)
        found = set().union(*written).intersection(chain(*blocks))
        if self._has_states or request.computed_tokens < target.end_token or found:
            plan.refused.append(target.transfer_id)
            return
        tokens = TokenRange(target.transfer_id, target.start_token, target.end_token, blocks)
        plan.send_computed(target, tokens)

    def _overruns(self, end_token: int, computed_tokens: int, known_tokens: int) -> bool:
        """Whether the step may overwrite what a transfer to `end_token` sends or has yet to send.

        A state is overwritten by the next token. vLLM frees a block of a window before the step after that.
        """
        if self._has_states and known_tokens > end_token:
            return True
        return self._has_windows and computed_tokens > end_token

    def _plan_tokens(self, plan: StepPlan, send: Send, known_tokens: int) -> None:
        """Adds the tokens up to `known_tokens` that are not planned yet: whole blocks, except for the last tokens."""
        end = send.target.end_token
        is_last = known_tokens >= end
        if not is_last:
            stride = self._token_stride
            end = known_tokens - known_tokens % stride if stride else send.planned_tokens
        if end > send.planned_tokens:
            blocks = tuple(self._source_blocks(send, group, is_last) for group in self._groups)
            plan.computed.append(
                TokenRange(send.target.transfer_id, send.planned_tokens, end, blocks)
            )
            send.plan_until(end)

    def _source_blocks(self, send: Send, group: LayerGroup, is_last: bool) -> tuple[int, ...]:
        block_ids = send.block_ids[group.index]
        if group.kind == TOKENS:
            return tuple(block_ids)
        end = send.target.end_token
        return group.blocks_between(block_ids, end - 1, end) if is_last else ()

    def request_leaves(self, request_id: str) -> int | None:
        """See PartialReceives.leave. What is whole by now lacks no KV, also before the next plan."""
        for transfer_id, whole in tuple(self._settled):
            if whole and transfer_id in self.partial.receives:
                self.partial.settle(transfer_id, whole)
        return self.partial.leave(request_id)

    def request_finished(self, request_id: str) -> PrefillTimes | None:
        """The request has ended. Returns its times when it has run and sent.

        The blocks of such a request must stay until the ranks report that they are quiet. If it has never run,
        its transfer reads none of them, and the service ends the transfer.
        """
        for transfer_id, receive in self._receives.items():
            if receive.request_id == request_id:
                receive.cancel()
                if receive.whole:
                    self._settled.append((transfer_id, True))
        send = self._sends.pop(request_id, None)
        if send is None or not send.runs:
            return None
        self._plan.free_after_send(request_id, send.target.transfer_id)
        return PrefillTimes(
            send.cached_tokens, send.start_unix_ns, time.time_ns(), send.fetched_tokens
        )


def _end_token(params: ReceiveParams, known_tokens: int) -> int:
    """One past the last token that is transferred."""
    whole = known_tokens if params.awaits_first_token else known_tokens - 1
    return params.computes_from or whole

"""Executes step plans on a rank: sends what the forward pass computes. Uses no vLLM types."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_common.errors import Cancelled, HeadraceError, NotFound, TransferFailed
from headrace_common.tasks import Recent
from headrace_engine.connector.step_plan import (
    HostSend,
    StepPlan,
    TokenRange,
)
from headrace_kv.layout import STATE, KvLayout
from headrace_kv.messages import LayerRange, SendReport, TransferTarget
from headrace_kv.transport.memory import PASSED, Mark

if TYPE_CHECKING:
    from headrace_kv.send.sender import RankSender


log = logging.getLogger(__name__)

KNOWN_TRANSFERS_MAX = 4096
PREEMPTION_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A layer's group in the layout, and whether it keeps a state rather than tokens."""

    group_index: int
    is_state: bool


def layer_kinds(layout: KvLayout, rank: int) -> dict[int, LayerKind]:
    """Those of the layers of a rank's stage, by their number in the layout."""
    return {
        layer: LayerKind(layout.group_index(layer), layout.group_of(layer).kind == STATE)
        for layer in layout.layers_of(rank)
    }


class StepExecutor:
    """The rank's compute thread calls it. Any thread may call `stop`, `send_from_host` and `transfer_quiet`.

    `on_report` gets one report per transfer that was opened or stopped, once it has no write under way.
    """

    def __init__(self, rank: int, on_report: Callable[[SendReport], None]) -> None:
        self._rank = rank
        self._on_report = on_report
        self._sender: RankSender | None = None
        self._layers: Mapping[int, LayerKind] = {}
        self._changed = threading.Condition()
        self._active: set[str] = set()
        self._known_ids: Recent[str, None] = Recent(KNOWN_TRANSFERS_MAX)
        self._finishing: dict[str, str] = {}
        self._plan = StepPlan()
        # Of the step until the next one begins, and the layers that were sent.
        self._computed: Sequence[TokenRange] = ()
        self._written: set[int] = set()
        self._fence: Callable[[], None] = lambda: None
        self._mark: Callable[[], Mark] = lambda: PASSED
        self._final: Mapping[str, str] = {}
        self._host_sends: dict[str, list[int]] = {}
        self._ended_host_sends: list[int] = []

    def start(
        self,
        fence: Callable[[], None],
        sender: RankSender | None = None,
        layers: Mapping[int, LayerKind] | None = None,
        mark: Callable[[], Mark] = lambda: PASSED,
    ) -> None:
        """Before the first step, and again with a sender once the rank is to send. Without one it needs no `layers`.

        `layers` are those of the rank's stage, by their number in the layout. `fence` orders the steps after it behind
        the peers' writes, and what is pushed is sent once the device has passed its `mark`, see DeviceOrder.
        """
        self._fence = fence
        self._sender = sender
        self._layers = layers or {}
        self._mark = mark

    def transfer_quiet(self, report: SendReport) -> None:
        """The sender's callback: a transfer has no write under way any more."""
        with self._changed:
            self._active.discard(report.transfer_id)
            self._ended_host_sends += self._host_sends.pop(report.transfer_id, ())
            self._changed.notify_all()
        self._on_report(report)

    def stop(self, transfer_id: str) -> None:
        """Stops a transfer, or prevents one that no step has opened yet."""
        reason, detail = Cancelled.reason, "prefill cancelled the transfer"
        with self._changed:
            opened = transfer_id in self._active
            unknown = transfer_id not in self._known_ids
            self._known_ids[transfer_id] = None
        if opened and self._sender is not None:
            self._sender.stop(transfer_id, reason, detail)
        elif unknown:
            self._on_report(SendReport(transfer_id, self._rank, reason, detail, ()))

    def preempt(self, plan: StepPlan) -> None:
        """Before a step that overwrites the blocks of preempted transfers. Waits until nothing reads them."""
        self._stop_and_wait(
            plan.preempted, "prefill ran out of KV blocks and preempted the request"
        )

    def _stop_and_wait(self, transfer_ids: Sequence[str], why: str) -> None:
        """Stops transfers and waits until none of them reads its blocks any more."""
        if self._sender is None or not transfer_ids:
            return
        for transfer_id in transfer_ids:
            self._sender.stop(transfer_id, TransferFailed.reason, why)
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._active.isdisjoint(transfer_ids), PREEMPTION_WAIT_S
            ):
                # The transfers have failed, so decode does not read what they may still write.
                log.error("transfers %s were not quiet in %g s", transfer_ids, PREEMPTION_WAIT_S)

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass. Raises TransferFailed when the step cannot read what peers have written."""
        self._plan, self._computed = plan, plan.computed
        self._written.clear()
        self._final = plan.final
        if plan.fences:
            self._fence()
        for transfer_id in plan.refused:
            self._refuse(transfer_id, NotFound.reason, "some of the KV is not cached")
        if self._sender is None:
            for target in plan.opened:
                self._refuse(target.transfer_id, TransferFailed.reason, "the rank cannot send")
            return
        for target in plan.opened:
            # Under the lock, so that a stop finds the transfer either unknown or open.
            with self._changed:
                if target.transfer_id not in self._known_ids:
                    self._known_ids[target.transfer_id] = None
                    self._open(self._sender, target)
        self._stop_and_wait(plan.overrun, "prefill computed tokens beyond the state to be sent")
        if plan.ready:
            ready_ns, mark = time.monotonic_ns(), self._mark()
            for tokens in plan.ready:
                for layer, kind in self._layers.items():
                    if not kind.is_state:
                        self._push(tokens, layer, ready_ns, mark)

    def _refuse(self, transfer_id: str, reason: str, detail: str) -> None:
        """Reports a transfer that is not opened, unless a stop has reported it."""
        with self._changed:
            if transfer_id in self._known_ids:
                return
            self._known_ids[transfer_id] = None
        self._on_report(SendReport(transfer_id, self._rank, reason, detail))

    def _open(self, sender: RankSender, target: TransferTarget) -> None:
        try:
            sender.open(target)
            self._active.add(target.transfer_id)
        except HeadraceError as exc:
            self._on_report(SendReport(target.transfer_id, self._rank, exc.reason, exc.detail))

    def layer_written(self, layer: int) -> None:
        """A forward pass has written this step's KV of the layer.

        A draft's first pass of a step writes it. Its other passes write behind it, for tokens that may be rejected.
        """
        if self._sender is None or not self._computed or layer in self._written:
            return
        self._written.add(layer)
        ready_ns, mark = time.monotonic_ns(), self._mark()
        for tokens in self._computed:
            self._push(tokens, layer, ready_ns, mark)

    def send_from_host(self, send: HostSend, lost: bool) -> None:
        """Blocks of main memory have their content, and the transfer of an earlier plan may read them.

        If their content is `lost`, the transfer fails.
        """
        tokens = send.tokens
        with self._changed:
            if tokens.transfer_id not in self._active:
                self._ended_host_sends.append(send.number)
                return
            self._host_sends.setdefault(tokens.transfer_id, []).append(send.number)
        if lost and self._sender is not None:
            why = "main memory has lost the blocks"
            self._sender.stop(tokens.transfer_id, TransferFailed.reason, why)
            return
        ready_ns = time.monotonic_ns()
        for layer in self._layers:
            self._push(tokens, layer, ready_ns, PASSED, in_host_memory=True)

    def take_ended_host_sends(self) -> list[int]:
        """The numbers of sends from main memory that have ended since the last call."""
        with self._changed:
            ended, self._ended_host_sends = self._ended_host_sends, []
        return ended

    def hidden_states_computed(self, reader_of: Callable[[str], Callable[[], bytes]]) -> None:
        """The step has computed the hidden states of the last positions. Called once, before the next step.

        `reader_of` a request queues the copy of its state to host memory. What it returns gives the copy.
        """
        final, self._final = self._final, {}
        if self._sender is None:
            return
        for request_id, transfer_id in final.items():
            if transfer_id not in self._active:
                continue
            try:
                read = reader_of(request_id)
                self._sender.push_hidden_state(transfer_id, read, self._mark())
            except (KeyError, RuntimeError) as error:
                why = f"the hidden state cannot be read: {error}"
                self._sender.stop(transfer_id, TransferFailed.reason, why)

    def forward_ended(self) -> None:
        """The last forward pass has ended. vLLM has no hook for states, which are final with a transfer's last token.

        Near the longest context, vLLM drafts nothing. Then the draft's layers are sent as they are.
        """
        ready_ns = time.monotonic_ns()
        for layer, kind in self._layers.items() if self._computed else ():
            if not kind.is_state:
                self.layer_written(layer)
            else:
                for tokens in self._computed:
                    if tokens.block_ids[kind.group_index]:
                        self._push(tokens, layer, ready_ns, self._mark())

    def _push(
        self,
        tokens: TokenRange,
        layer: int,
        ready_ns: int,
        mark: Mark,
        *,
        in_host_memory: bool = False,
    ) -> None:
        if self._sender is not None and tokens.transfer_id in self._active:
            self._sender.push(
                LayerRange(
                    tokens.transfer_id,
                    layer,
                    tokens.start_token,
                    tokens.end_token,
                    tokens.block_ids[self._layers[layer].group_index],
                    ready_ns,
                    in_host_memory,
                ),
                mark,
            )

    def end_step(self) -> tuple[set[str], set[str], set[str]]:
        """After the model's forward pass. Returns requests that finished sending, that finished receiving, and that
        failed.

        The failed ones are among those that finished receiving. A draft's forward passes may follow.
        """
        plan, self._plan = self._plan, StepPlan()
        for request_id, transfer_id in plan.finished_sends.items():
            self._finishing[request_id] = transfer_id
            if self._sender is not None and transfer_id in self._active:
                self._sender.finish(transfer_id)
        sent = {
            request_id
            for request_id, transfer_id in self._finishing.items()
            if transfer_id not in self._active
        }
        for request_id in sent:
            del self._finishing[request_id]
        failed = set(plan.failed)
        if plan.received and not self._fence_received():
            failed.update(plan.received)
        return sent, failed.union(plan.received), failed

    def _fence_received(self) -> bool:
        """Whether the next step can read what peers have written."""
        try:
            self._fence()
        except TransferFailed as exc:
            log.error("KV that has arrived cannot be read: %s", exc)
            return False
        return True

"""A rank's side: feeds its sender from the forward pass, and says what vLLM must know. Knows no vLLM types."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_common.errors import Cancelled, HeadraceError, TransferFailed
from headrace_engine.vllm.step.plan import StepPlan, TokenSpan
from headrace_kv.handoff.messages import LayerRange, SendReport, TransferTarget

log = logging.getLogger(__name__)

PREEMPTION_WAIT_S = 20.0
REFUSED_MAX = 4096


class Sender(Protocol):
    """The part of a RankSender that the forward pass uses. Nothing here blocks."""

    def open(self, target: TransferTarget) -> None: ...

    def push(self, piece: LayerRange) -> None: ...

    def push_logits(self, transfer_id: str, logits: bytes) -> None: ...

    def finish(self, transfer_id: str) -> None: ...

    def stop(self, transfer_id: str, reason: str, detail: str) -> None: ...


@dataclass(frozen=True, slots=True)
class LayerKind:
    """A layer's group in the layout, and whether it keeps a state rather than tokens."""

    group_index: int
    is_state: bool


class ConnectorWorker:
    """Called on the rank's compute thread, except `stop` and `quiet`, which any thread may call.

    `on_report` gets one report per transfer that was opened or stopped, when nothing of it writes any more. `fence`
    lets the steps after it see what peers have written, see DeviceOrder.
    """

    def __init__(self, rank: int, on_report: Callable[[SendReport], None]) -> None:
        self._rank = rank
        self._on_report = on_report
        self._sender: Sender | None = None
        self._layers: tuple[LayerKind, ...] = ()
        self._changed = threading.Condition()
        self._active: set[str] = set()
        self._refused: OrderedDict[str, None] = OrderedDict()
        self._finishing: dict[str, str] = {}
        self._plan = StepPlan()
        self.fence: Callable[[], None] = lambda: None
        self._final: set[str] = set()

    def start(self, sender: Sender, layers: Sequence[LayerKind]) -> None:
        """Gives it what it feeds, and the layout's layers; a rank that only receives has none."""
        self._sender = sender
        self._layers = tuple(layers)

    def quiet(self, report: SendReport) -> None:
        """A transfer does not write any more. The sender's callback."""
        with self._changed:
            self._active.discard(report.transfer_id)
            self._changed.notify_all()
        self._on_report(report)

    def stop(self, transfer_id: str) -> None:
        """Ends a transfer, also one that the forward pass has not come to yet."""
        reason, detail = Cancelled.reason, "prefill gave the transfer up"
        with self._changed:
            opened = transfer_id in self._active
            unknown = transfer_id not in self._refused
            self._refuse(transfer_id)
        if opened and self._sender is not None:
            self._sender.stop(transfer_id, reason, detail)
        elif unknown:
            self._on_report(SendReport(transfer_id, self._rank, reason, detail, ()))

    def _refuse(self, transfer_id: str) -> None:
        self._refused[transfer_id] = None
        while len(self._refused) > REFUSED_MAX:
            self._refused.popitem(last=False)

    def preempt(self, plan: StepPlan) -> None:
        """Before a step that overwrites blocks: nothing of the preempted transfers may still read them."""
        self._end_now(plan.preempted, "prefill ran out of KV blocks and gave the request up")

    def _end_now(self, transfer_ids: Sequence[str], why: str) -> None:
        """Stops transfers, and returns when nothing of them reads its blocks any more."""
        if self._sender is None or not transfer_ids:
            return
        for transfer_id in transfer_ids:
            self._sender.stop(transfer_id, TransferFailed.reason, why)
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._active.isdisjoint(transfer_ids), PREEMPTION_WAIT_S
            ):
                # The transfers have failed, so decode will not read what they may still write.
                log.error("transfers %s were not quiet in %g s", transfer_ids, PREEMPTION_WAIT_S)

    def begin_step(self, plan: StepPlan) -> None:
        """Before the forward pass."""
        self._plan = plan
        self._final = set(plan.final)
        if self._sender is None:
            return
        for target in plan.opened:
            # Under the lock, so that a stop finds the transfer either unknown or open.
            with self._changed:
                if target.transfer_id not in self._refused:
                    self._refuse(target.transfer_id)
                    self._open(self._sender, target)
        self._end_now(plan.overrun, "prefill computed more tokens than its state is wanted for")
        ready_ns = time.time_ns()
        for span in plan.ready:
            for layer, kind in enumerate(self._layers):
                if not kind.is_state:
                    self._push(span, layer, ready_ns)

    def _open(self, sender: Sender, target: TransferTarget) -> None:
        try:
            sender.open(target)
            self._active.add(target.transfer_id)
        except HeadraceError as exc:
            self._on_report(SendReport(target.transfer_id, self._rank, exc.reason, exc.detail, ()))

    def layer_written(self, layer: int) -> None:
        """This step's tokens of the layer are in the cache."""
        if self._sender is None or not self._plan.computed:
            return
        ready_ns = time.time_ns()
        for span in self._plan.computed:
            self._push(span, layer, ready_ns)

    def sampled(self, transfer_id: str, read_logits: Callable[[], bytes]) -> None:
        """The step's logits of a request are there. They come after `end_step`, and before the next step."""
        if self._sender is not None and transfer_id in self._final & self._active:
            self._sender.push_logits(transfer_id, read_logits())

    def states_written(self) -> None:
        """The forward pass is over. States have no hook of their own, and are final with a transfer's last token."""
        ready_ns = time.time_ns()
        for layer, kind in enumerate(self._layers):
            if kind.is_state:
                for span in self._plan.computed:
                    if span.block_ids[kind.group_index]:
                        self._push(span, layer, ready_ns)

    def _push(self, span: TokenSpan, layer: int, ready_ns: int) -> None:
        if self._sender is not None and span.transfer_id in self._active:
            self._sender.push(
                LayerRange(
                    span.transfer_id,
                    layer,
                    span.start_token,
                    span.end_token,
                    span.block_ids[self._layers[layer].group_index],
                    ready_ns,
                )
            )

    def end_step(self) -> tuple[set[str], set[str], set[str]]:
        """After the forward pass: requests that finished sending, that finished receiving, and of these the failed."""
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
        if plan.received and not self._see_received():
            failed.update(plan.received)
        return sent, failed.union(plan.received), failed

    def _see_received(self) -> bool:
        """Whether the next step sees what peers have written."""
        try:
            self.fence()
        except TransferFailed as exc:
            log.error("what was received cannot be read: %s", exc)
            return False
        return True

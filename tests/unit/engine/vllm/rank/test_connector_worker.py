"""A rank's side: what it feeds its sender, and what it reports."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from headrace_common.errors import QueueFull, TransferFailed
from headrace_engine.vllm.rank.connector_worker import ConnectorWorker, LayerKind
from headrace_engine.vllm.step.plan import StepPlan, TokenSpan
from headrace_kv.handoff.messages import LayerRange, SendReport, TransferTarget
from headrace_kv.layout.layout import WorkerRef

TARGET = TransferTarget("x1", WorkerRef("d0", "1"), "127.0.0.1:1", 0, 96, 1e12)
SPAN = TokenSpan("x1", 0, 64, ((1, 2), ()))
TAIL = TokenSpan("x1", 64, 96, ((1, 2, 3), (9,)))
TOKENS, STATE = LayerKind(0, is_state=False), LayerKind(1, is_state=True)


class Recorder:
    """Stands for a RankSender that never gets to write."""

    def __init__(self, full: bool = False) -> None:
        self.said: list[tuple[str, ...]] = []
        self.pieces: list[LayerRange] = []
        self.full = full

    def open(self, target: TransferTarget) -> None:
        if self.full:
            raise QueueFull("too many")
        self.said.append(("open", target.transfer_id))

    def push(self, piece: LayerRange) -> None:
        self.pieces.append(piece)

    def push_logits(self, transfer_id: str, logits: bytes) -> None:
        self.said.append(("logits", transfer_id, logits.decode()))

    def finish(self, transfer_id: str) -> None:
        self.said.append(("finish", transfer_id))

    def stop(self, transfer_id: str, reason: str, detail: str) -> None:
        self.said.append(("stop", transfer_id, reason))


def started(
    full: bool = False, layers: Sequence[LayerKind] = ()
) -> tuple[ConnectorWorker, Recorder, list[SendReport]]:
    reports: list[SendReport] = []
    side = ConnectorWorker(0, reports.append)
    sender = Recorder(full)
    side.start(sender, layers or (TOKENS, TOKENS))
    return side, sender, reports


def quiet(side: ConnectorWorker, transfer_id: str = "x1", reason: str = "") -> None:
    side.quiet(SendReport(transfer_id, 0, reason, "", ()))


def test_ready_tokens_go_first_for_all_layers_then_each_layer_as_it_is_written() -> None:
    side, sender, _ = started()
    side.begin_step(StepPlan(opened=[TARGET], ready=[SPAN], computed=[TAIL]))
    assert [(p.layer, p.start_token) for p in sender.pieces] == [(0, 0), (1, 0)]
    side.layer_written(0)
    side.layer_written(1)
    assert [(p.layer, p.start_token, p.end_token) for p in sender.pieces[2:]] == [
        (0, 64, 96),
        (1, 64, 96),
    ]
    side.end_step()
    side.layer_written(0)
    assert len(sender.pieces) == 4


def test_a_finished_request_is_reported_once_when_its_sender_is_quiet() -> None:
    side, sender, _ = started()
    side.begin_step(StepPlan(opened=[TARGET]))
    assert side.end_step() == (set(), set(), set())
    side.begin_step(StepPlan(finished_sends={"r": "x1"}))
    assert side.end_step()[0] == set()
    assert ("finish", "x1") in sender.said
    quiet(side)
    side.begin_step(StepPlan())
    assert side.end_step()[0] == {"r"}
    assert side.end_step()[0] == set()


def test_a_sender_that_is_quiet_before_its_request_ends_is_not_forgotten() -> None:
    side, _, reports = started()
    side.begin_step(StepPlan(opened=[TARGET]))
    quiet(side)
    side.begin_step(StepPlan(finished_sends={"r": "x1"}))
    assert side.end_step()[0] == {"r"}
    assert [report.transfer_id for report in reports] == ["x1"]


def test_a_stop_before_the_transfer_opens_refuses_it_and_reports_once() -> None:
    side, sender, reports = started()
    side.stop("x1")
    side.stop("x1")
    assert [(report.transfer_id, report.reason) for report in reports] == [("x1", "CANCELLED")]
    side.begin_step(StepPlan(opened=[TARGET], ready=[SPAN], computed=[TAIL]))
    side.layer_written(0)
    assert sender.said == []
    assert sender.pieces == []
    side.begin_step(StepPlan(finished_sends={"r": "x1"}))
    assert side.end_step()[0] == {"r"}


def test_a_stop_of_an_open_transfer_leaves_the_report_to_the_sender() -> None:
    side, sender, reports = started()
    side.begin_step(StepPlan(opened=[TARGET]))
    side.stop("x1")
    assert ("stop", "x1", "CANCELLED") in sender.said
    assert reports == []
    quiet(side, reason="CANCELLED")
    side.stop("x1")
    assert len(reports) == 1


def test_a_sender_that_takes_no_more_fails_only_that_transfer() -> None:
    side, _, reports = started(full=True)
    side.begin_step(StepPlan(opened=[TARGET], ready=[SPAN]))
    assert [(report.transfer_id, report.reason) for report in reports] == [("x1", "QUEUE_FULL")]
    side.begin_step(StepPlan(finished_sends={"r": "x1"}))
    assert side.end_step()[0] == {"r"}


def test_preempted_blocks_are_overwritten_only_once_the_sender_is_quiet() -> None:
    side, sender, _ = started()
    side.begin_step(StepPlan(opened=[TARGET]))
    side.end_step()
    timer = threading.Timer(0.2, quiet, (side,))
    timer.start()
    waited = threading.Event()

    def preempt() -> None:
        side.preempt(StepPlan(preempted=["x1"]))
        waited.set()

    thread = threading.Thread(target=preempt)
    thread.start()
    assert not waited.wait(0.05)
    assert waited.wait(5)
    thread.join()
    timer.join()
    assert ("stop", "x1", "TRANSFER_FAILED") in sender.said


def test_receivers_are_reported_as_the_plan_says() -> None:
    side = ConnectorWorker(1, lambda report: None)
    side.begin_step(StepPlan(received=["a"], failed=["b"]))
    assert side.end_step() == (set(), {"a", "b"}, {"b"})
    assert side.end_step() == (set(), set(), set())


def test_states_go_after_the_forward_pass_that_makes_them_final() -> None:
    side, sender, _ = started(layers=(STATE, TOKENS, STATE))
    side.begin_step(StepPlan(opened=[TARGET], ready=[SPAN]))
    side.layer_written(1)
    side.states_written()
    assert [piece.layer for piece in sender.pieces] == [1]
    side.end_step()
    side.begin_step(StepPlan(computed=[TAIL]))
    side.layer_written(1)
    assert [piece.layer for piece in sender.pieces] == [1, 1]
    side.states_written()
    states = sender.pieces[2:]
    assert [(p.layer, p.end_token, p.block_ids) for p in states] == [(0, 96, (9,)), (2, 96, (9,))]
    side.end_step()
    side.states_written()
    assert len(sender.pieces) == 4


def test_a_state_is_overwritten_only_once_its_transfer_is_quiet() -> None:
    side, sender, _ = started(layers=(STATE, TOKENS))
    side.begin_step(StepPlan(opened=[TARGET], computed=[TAIL]))
    side.states_written()
    side.end_step()
    timer = threading.Timer(0.1, quiet, (side,))
    timer.start()
    side.begin_step(StepPlan(overrun=["x1"]))
    timer.join()
    assert ("stop", "x1", "TRANSFER_FAILED") in sender.said


def test_what_was_received_is_fenced_before_a_step_may_read_it() -> None:
    side, _, _ = started()
    fences: list[str] = []
    side.fence = lambda: fences.append("fenced")
    side.begin_step(StepPlan(failed=["f"]))
    assert side.end_step() == (set(), {"f"}, {"f"})
    assert fences == []
    side.begin_step(StepPlan(received=["r", "s"], failed=["f"]))
    assert side.end_step() == (set(), {"r", "s", "f"}, {"f"})
    assert fences == ["fenced"]


def test_what_cannot_be_fenced_has_failed() -> None:
    side, _, _ = started()

    def fail() -> None:
        raise TransferFailed("code 700")

    side.fence = fail
    side.begin_step(StepPlan(received=["r"]))
    assert side.end_step() == (set(), {"r"}, {"r"})


def test_only_the_logits_of_a_last_token_are_sent_on_and_no_others_are_read() -> None:
    side, sender, _ = started()

    def never() -> bytes:
        raise AssertionError("nobody wants these")

    side.begin_step(StepPlan(opened=[TARGET], computed=[SPAN]))
    side.end_step()
    side.sampled("x1", never)
    side.begin_step(StepPlan(computed=[TAIL], final=["x1", "x2"]))
    side.end_step()
    side.sampled("x2", never)
    side.sampled("x1", lambda: b"row")
    assert sender.said[-1] == ("logits", "x1", "row")
    side.begin_step(StepPlan())
    side.sampled("x1", never)


def test_logits_of_a_stopped_transfer_are_not_read() -> None:
    side, sender, _ = started()
    side.begin_step(StepPlan(opened=[TARGET], computed=[SPAN], final=["x1"]))
    quiet(side)
    side.sampled("x1", lambda: b"row")
    assert all(said[0] != "logits" for said in sender.said)

"""The receipt of a request, from those of its attempts."""

from __future__ import annotations

from headrace.inference.v1 import receipt_pb2
from headrace_common.errors import Cancelled, WorkerGone
from headrace_frontend.running.receipt import (
    RECEIPT_FIELD,
    AttemptReceipt,
    receipt_field,
    receipt_of,
)

LINK = receipt_pb2.LinkUse(source_worker_id="p", destination_worker_id="d", payload_bytes=8)


def part(prefill_us: int = 0, decode_us: int = 0, computed: int = 0) -> receipt_pb2.Receipt:
    return receipt_pb2.Receipt(
        prefill_device_us=prefill_us,
        decode_device_us=decode_us,
        computed_tokens=computed,
        cached_tokens=1,
        kv=[receipt_pb2.KvUse(tier="device", byte_seconds=2.0)],
    )


def test_an_attempt_that_failed_by_a_fault_is_paid_by_the_operator() -> None:
    lost = AttemptReceipt([part(50, computed=10)], WorkerGone.reason, 0, [LINK])
    moved = AttemptReceipt([part(60, computed=12), part(decode_us=70)], "", 2, [LINK])
    assert receipt_of([lost, moved]) == receipt_pb2.Receipt(
        prefill_device_us=60,
        decode_device_us=70,
        operator_device_us=50,
        computed_tokens=22,
        recomputed_tokens=12,
        cached_tokens=3,
        attempts=2,
        moves=1,
        kv=[receipt_pb2.KvUse(tier="device", byte_seconds=4.0)],
        links=[LINK, LINK],
    )


def test_a_client_pays_for_what_it_cancels() -> None:
    receipt = receipt_of([AttemptReceipt([part(50)], Cancelled.reason, 0)])
    assert (receipt.prefill_device_us, receipt.operator_device_us) == (50, 0)


def test_the_receipts_of_the_choices_of_an_answer_are_added_up() -> None:
    one = receipt_of([AttemptReceipt([part(50, 60, 3)], "", 0, [LINK])])
    found = receipt_field([one, one])[RECEIPT_FIELD]
    assert found["prefill_device_us"] == 100
    assert found["kv_byte_seconds"] == {"device": 4.0}
    assert found["sent_bytes"] == 16


def test_no_report_of_a_worker_makes_a_sum_overflow() -> None:
    worst = receipt_pb2.Receipt(
        decode_device_us=2**64 - 1,
        computed_tokens=2**64 - 1,
        kv=[
            receipt_pb2.KvUse(tier="a tier of its own", byte_seconds=1.0),
            receipt_pb2.KvUse(tier="host", byte_seconds=1e18),
            receipt_pb2.KvUse(tier="disk", byte_seconds=-1e18),
        ],
    )
    receipt = receipt_of([AttemptReceipt([worst, worst], "", 0)])
    assert receipt.decode_device_us == receipt.computed_tokens == 2 * 10**12
    assert {use.tier: use.byte_seconds for use in receipt.kv} == {"host": 2e15, "disk": 0.0}


def test_an_answer_of_workers_that_report_no_cost_has_no_field() -> None:
    assert receipt_field([receipt_of([AttemptReceipt([], "", 0)])]) == {}

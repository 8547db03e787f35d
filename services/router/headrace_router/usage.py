"""What requests have cost, by the hour of their end, tenant, model and adapter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, TypeAlias

from headrace.inference.v1 import load_pb2, receipt_pb2
from headrace_common.durations import timestamp_from_unix_ns
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.instruments import OTHER
from headrace_common.telemetry.metrics.process import Metrics
from headrace_common.time_model.receipts import add_receipt
from headrace_frontend.running.receipt import AttemptReceipt, receipt_of
from headrace_frontend.running.record import RequestRecord

HOUR_NS: Final = 3_600_000_000_000
HOURS_MAX: Final = 168
_SENT_MAX: Final = 2**40
"""Bytes of one link that count, so that no sum overflows."""
LINES_MAX: Final = 256
"""Of an hour. Further tenants share one line."""
_Payer: TypeAlias = tuple[str, str, str]


class UsageBook:
    """Adds up the receipts of requests. One event loop owns it."""

    def __init__(self, metrics: Metrics) -> None:
        self._hours: dict[int, dict[_Payer, load_pb2.HourlyUsage]] = {}
        self._device_time = metrics.store.counter(
            schema.METRIC_USAGE_DEVICE_TIME,
            schema.ATTRIBUTE_TENANT,
            schema.ATTRIBUTE_GEN_AI_REQUEST_MODEL,
            schema.ATTRIBUTE_USAGE_KIND,
        )
        self._kv = metrics.store.counter(
            schema.METRIC_USAGE_KV,
            schema.ATTRIBUTE_TENANT,
            schema.ATTRIBUTE_GEN_AI_REQUEST_MODEL,
            schema.ATTRIBUTE_TIER,
        )

    def add(self, record: RequestRecord) -> None:
        """A request has ended. One that was never valid has cost nothing."""
        if not record.payer[0]:
            return
        receipt = record.receipt
        payer, end_unix_ns = record.payer, record.end_unix_ns
        line = self._line(payer, end_unix_ns)
        line.request_count += 1
        line.prompt_tokens += record.prompt_tokens
        line.answer_tokens += record.usage.completion_tokens if record.usage is not None else 0
        for link in receipt.links:
            line.sent_bytes += min(link.payload_bytes, _SENT_MAX)
        self._charge(payer, line, receipt)
        for attempt in record.attempts:
            # Links keep it for a while, and should not keep the record.
            attempt.report_late(partial(self._add_late, payer, end_unix_ns, attempt.reason))

    def _add_late(
        self, payer: _Payer, end_unix_ns: int, reason: str, part: receipt_pb2.Receipt
    ) -> None:
        late = receipt_of([AttemptReceipt([part], reason, 0)])
        late.attempts = 0
        self._charge(payer, self._line(payer, end_unix_ns), late)

    def _charge(
        self, payer: _Payer, line: load_pb2.HourlyUsage, receipt: receipt_pb2.Receipt
    ) -> None:
        tenant, model, _ = payer
        add_receipt(line.receipt, receipt)
        for kind, device_us in (
            ("prefill", receipt.prefill_device_us),
            ("decode", receipt.decode_device_us),
            ("operator", receipt.operator_device_us),
        ):
            self._device_time.add(1e-6 * device_us, tenant, model, kind)
        for use in receipt.kv:
            self._kv.add(use.byte_seconds, tenant, model, use.tier)

    def since(self, unix_ns: int) -> Iterator[load_pb2.HourlyUsage]:
        """The lines of the hours that end after this time, oldest first."""
        for start_ns, lines in sorted(self._hours.items()):
            if start_ns + HOUR_NS <= unix_ns:
                continue
            for (tenant, model, adapter), line in lines.items():
                head = load_pb2.HourlyUsage(
                    start_time=timestamp_from_unix_ns(start_ns),
                    tenant=tenant,
                    model=model,
                    adapter=adapter,
                )
                head.MergeFrom(line)
                yield head

    def _line(self, payer: _Payer, end_unix_ns: int) -> load_pb2.HourlyUsage:
        lines = self._hours.setdefault(end_unix_ns // HOUR_NS * HOUR_NS, {})
        while len(self._hours) > HOURS_MAX:
            del self._hours[min(self._hours)]
        if payer not in lines and len(lines) >= LINES_MAX:
            payer = (OTHER, payer[1], "")
        return lines.setdefault(payer, load_pb2.HourlyUsage())

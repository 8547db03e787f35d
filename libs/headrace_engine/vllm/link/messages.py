"""Converts values of headrace_kv to and from the link's messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.engine.v1 import link_pb2
from headrace_common.durations import (
    duration_from_ns,
    ns_from_duration,
    timestamp_from_unix_ns,
    unix_ns_from_timestamp,
)
from headrace_kv.handoff.messages import LayerSent, Reservation, SendReport
from headrace_kv.handoff.proto import reservation_fields


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests in the batch and outside it. KV blocks that requests hold, and all blocks that they can hold."""

    running_requests: int = 0
    waiting_requests: int = 0
    used_blocks: int = 0
    total_blocks: int = 0


def reservation_to_proto(reservation: Reservation) -> link_pb2.BlocksReserved:
    return link_pb2.BlocksReserved(**reservation_fields(reservation))


def load_to_proto(load: EngineLoad) -> link_pb2.EngineLoad:
    return link_pb2.EngineLoad(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
    )


def load_from_proto(message: link_pb2.EngineLoad) -> EngineLoad:
    return EngineLoad(
        message.running_requests,
        message.waiting_requests,
        message.used_blocks,
        message.total_blocks,
    )


def report_to_proto(report: SendReport) -> link_pb2.SendReport:
    return link_pb2.SendReport(
        transfer_id=report.transfer_id,
        rank=report.rank,
        reason=report.reason,
        detail=report.detail,
        layers=[_layer_to_proto(layer) for layer in report.layers],
        control_bytes=report.control_bytes,
    )


def report_from_proto(message: link_pb2.SendReport) -> SendReport:
    return SendReport(
        transfer_id=message.transfer_id,
        rank=message.rank,
        reason=message.reason,
        detail=message.detail,
        layers=tuple(_layer_from_proto(layer) for layer in message.layers),
        control_bytes=message.control_bytes,
    )


def _layer_to_proto(layer: LayerSent) -> link_pb2.LayerSent:
    return link_pb2.LayerSent(
        layer=layer.layer,
        destination_rank=layer.destination_rank,
        start_token=layer.start_token,
        end_token=layer.end_token,
        payload_bytes=layer.payload_bytes,
        run_count=layer.run_count,
        ready_time=timestamp_from_unix_ns(layer.ready_unix_ns),
        start_time=timestamp_from_unix_ns(layer.start_unix_ns),
        duration=duration_from_ns(layer.duration_ns),
        transport=layer.transport,
        strategy=layer.strategy,
        entry_count=layer.entry_count,
    )


def _layer_from_proto(message: link_pb2.LayerSent) -> LayerSent:
    return LayerSent(
        layer=message.layer,
        destination_rank=message.destination_rank,
        start_token=message.start_token,
        end_token=message.end_token,
        payload_bytes=message.payload_bytes,
        run_count=message.run_count,
        ready_unix_ns=unix_ns_from_timestamp(message.ready_time),
        start_unix_ns=unix_ns_from_timestamp(message.start_time),
        duration_ns=ns_from_duration(message.duration),
        transport=message.transport,
        strategy=message.strategy,
        entry_count=message.entry_count,
    )

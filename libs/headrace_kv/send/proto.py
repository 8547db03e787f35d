"""Conversion to and from the messages about one transfer. Pure."""

from __future__ import annotations

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import (
    Cancelled,
    Draining,
    PermissionDenied,
    TransferFailed,
    Unauthenticated,
    WorkerGone,
    class_of,
)
from headrace_kv.send.layer_write import LayerWrite


def reason_from_peer(reason: str) -> str:
    """The reason to report on this rank when decode, or the stream to it, ended a transfer for `reason`.

    Draining and WorkerGone become TransferFailed: they describe the decode worker's state, not this rank's. So do the
    refusals of tickets: a client would take them for those of its own API key.
    """
    if class_of(reason) in (Draining, WorkerGone, Unauthenticated, PermissionDenied):
        return TransferFailed.reason
    return reason or Cancelled.reason


def opening(transfer_id: str, ticket: bytes) -> handoff_pb2.HandoffRequest:
    message = handoff_pb2.Open(transfer_id=transfer_id, ticket=ticket)
    return handoff_pb2.HandoffRequest(open=message)


def layer_done(transfer_id: str, write: LayerWrite) -> handoff_pb2.LayerDone:
    return handoff_pb2.LayerDone(
        transfer_id=transfer_id,
        layer=write.layer,
        destination_rank=write.destination_rank,
        start_token=write.start_token,
        end_token=write.end_token,
        payload_bytes=write.payload_bytes,
    )


def enclosed_bytes(layer: handoff_pb2.LayerDone) -> int:
    """Bytes that one LayerDone adds to the message that carries it."""
    nbytes = layer.ByteSize()
    return nbytes + (2 if nbytes < 128 else 3)


def layers_done(layers: list[handoff_pb2.LayerDone]) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(layers_done=handoff_pb2.LayersDone(layers=layers))


def commit(transfer_id: str, payload_bytes: int) -> handoff_pb2.HandoffRequest:
    message = handoff_pb2.Commit(transfer_id=transfer_id, payload_bytes=payload_bytes)
    return handoff_pb2.HandoffRequest(commit=message)


def failed(transfer_id: str, reason: str, detail: str) -> handoff_pb2.HandoffRequest:
    message = handoff_pb2.Failed(transfer_id=transfer_id, reason=reason, detail=detail)
    return handoff_pb2.HandoffRequest(failed=message)


def quiesced(transfer_id: str) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(quiesced=handoff_pb2.Quiesced(transfer_id=transfer_id))

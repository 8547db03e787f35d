"""What a prefill rank says about a transfer on its handoff stream. Pure."""

from __future__ import annotations

from headrace.kv.v1 import handoff_pb2
from headrace_common.errors import Cancelled, Draining, TransferFailed, WorkerGone
from headrace_kv.send.layer_write import LayerWrite


def reason_from_peer(reason: str) -> str:
    """Why a transfer ended on this rank, when the decode worker or the way to it was the cause.

    What is said of that worker must not be taken for this rank's own state.
    """
    if reason in (Draining.reason, WorkerGone.reason):
        return TransferFailed.reason
    return reason or Cancelled.reason


def opening(transfer_id: str) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(open=handoff_pb2.Open(transfer_id=transfer_id))


def layer_done(transfer_id: str, write: LayerWrite) -> handoff_pb2.LayerDone:
    return handoff_pb2.LayerDone(
        transfer_id=transfer_id,
        layer=write.layer,
        destination_rank=write.copy.edge.destination_rank,
        start_token=write.copy.start_token,
        end_token=write.copy.end_token,
        payload_bytes=write.payload_bytes,
        digest=write.digest,
    )


def enclosed_bytes(layer: handoff_pb2.LayerDone) -> int:
    """What one landed layer adds to the message that carries it, in bytes."""
    nbytes = layer.ByteSize()
    return nbytes + (2 if nbytes < 128 else 3)


def commit(transfer_id: str, payload_bytes: int) -> handoff_pb2.HandoffRequest:
    said = handoff_pb2.Commit(transfer_id=transfer_id, payload_bytes=payload_bytes)
    return handoff_pb2.HandoffRequest(commit=said)


def failed(transfer_id: str, reason: str, detail: str) -> handoff_pb2.HandoffRequest:
    said = handoff_pb2.Failed(transfer_id=transfer_id, reason=reason, detail=detail)
    return handoff_pb2.HandoffRequest(failed=said)


def quiesced(transfer_id: str) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(quiesced=handoff_pb2.Quiesced(transfer_id=transfer_id))

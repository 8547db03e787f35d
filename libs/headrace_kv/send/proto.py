"""Conversion to and from the messages about one transfer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

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

_REQUESTS_PER_BATCH: Final = 256


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


def batches(
    requests: Iterable[handoff_pb2.HandoffRequest],
) -> Iterator[handoff_pb2.HandoffRequest]:
    """The requests in order, in as few messages as possible. Hidden states, which are large, stay alone."""
    waiting: list[handoff_pb2.HandoffRequest] = []
    for request in requests:
        alone = request.HasField("hidden_state")
        if waiting and (alone or len(waiting) == _REQUESTS_PER_BATCH):
            yield _batch(waiting)
            waiting = []
        if alone:
            yield request
        else:
            waiting.append(request)
    if waiting:
        yield _batch(waiting)


def _batch(requests: list[handoff_pb2.HandoffRequest]) -> handoff_pb2.HandoffRequest:
    if len(requests) == 1:
        return requests[0]
    return handoff_pb2.HandoffRequest(batch=handoff_pb2.HandoffRequestBatch(requests=requests))


def commit(transfer_id: str, payload_bytes: int) -> handoff_pb2.HandoffRequest:
    message = handoff_pb2.Commit(transfer_id=transfer_id, payload_bytes=payload_bytes)
    return handoff_pb2.HandoffRequest(commit=message)


def failed(transfer_id: str, reason: str, detail: str) -> handoff_pb2.HandoffRequest:
    message = handoff_pb2.Failed(transfer_id=transfer_id, reason=reason, detail=detail)
    return handoff_pb2.HandoffRequest(failed=message)


def quiesced(transfer_id: str) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(quiesced=handoff_pb2.Quiesced(transfer_id=transfer_id))

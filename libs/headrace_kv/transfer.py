"""The words in which one transfer is spoken of. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_kv.layout import WorkerRef


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """Where one prompt's KV cache goes.

    `start_token` is the first token that decode lacks, as the router learned from the reservation, and `end_token`
    one past the last; `deadline_unix_s` is when the transfer becomes worthless.
    """

    transfer_id: str
    decode: WorkerRef
    handoff_endpoint: str
    start_token: int
    end_token: int
    deadline_unix_s: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """Decode's blocks for one transfer, the same on every decode rank.

    Block i of `block_ids` holds tokens from (start_token // block_tokens + i) * block_tokens; start_token is a multiple
    of block_tokens.
    """

    transfer_id: str
    block_ids: tuple[int, ...]
    start_token: int
    end_token: int


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """Tokens [start_token, end_token) of one layer, written to prefill's cache and ready to be sent.

    `block_ids` are the request's source blocks in token order from token 0. start_token is a multiple of block_tokens;
    so is end_token unless it is the transfer's last. `ready_unix_ns` is when the engine handed the piece over.
    """

    transfer_id: str
    layer: int
    start_token: int
    end_token: int
    block_ids: tuple[int, ...]
    ready_unix_ns: int


@dataclass(frozen=True, slots=True)
class LayerSent:
    """One piece, sent to one decode rank and acknowledged by the transport."""

    layer: int
    destination_rank: int
    start_token: int
    end_token: int
    payload_bytes: int
    run_count: int
    ready_unix_ns: int
    start_unix_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class SendReport:
    """What one prefill rank did for one transfer, made once, when nothing of it writes any more.

    `reason` is empty when all went well, else a reason of the error tree.
    """

    transfer_id: str
    rank: int
    reason: str
    detail: str
    layers: tuple[LayerSent, ...]

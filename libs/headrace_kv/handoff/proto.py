"""Conversion of reservations to and from messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypedDict

from headrace.kv.v1 import handoff_pb2
from headrace_kv.handoff.messages import Reservation


class ReservationMessage(Protocol):
    """A message with the fields of `handoff_pb2.Reservation`."""

    @property
    def transfer_id(self) -> str: ...

    @property
    def block_ids(self) -> Iterable[int]: ...

    @property
    def start_token(self) -> int: ...

    @property
    def end_token(self) -> int: ...

    @property
    def further_block_ids(self) -> Iterable[handoff_pb2.BlockList]: ...


class ReservationFields(TypedDict):
    """The arguments that construct a ReservationMessage."""

    transfer_id: str
    block_ids: tuple[int, ...]
    start_token: int
    end_token: int
    further_block_ids: list[handoff_pb2.BlockList]


def reservation_fields(reservation: Reservation) -> ReservationFields:
    return ReservationFields(
        transfer_id=reservation.transfer_id,
        block_ids=reservation.block_ids,
        start_token=reservation.start_token,
        end_token=reservation.end_token,
        further_block_ids=[
            handoff_pb2.BlockList(block_ids=block_ids)
            for block_ids in reservation.further_block_ids
        ],
    )


def reservation_from_proto(message: ReservationMessage) -> Reservation:
    return Reservation(
        message.transfer_id,
        tuple(message.block_ids),
        message.start_token,
        message.end_token,
        tuple(tuple(group.block_ids) for group in message.further_block_ids),
    )

"""Messages between a worker and its process of the pool."""

from __future__ import annotations

from headrace_kv.shard_map import Shard
from headrace_kv.tiers.pool import BATCH_BLOCKS_MAX, PoolKeys
from headrace_kv.tiers.pool_process import (
    PACKET_BYTES_MAX,
    PoolCall,
    PoolMemory,
    PoolReply,
    PoolSetup,
    call_from_packet,
    call_to_packet,
    reply_from_packet,
    reply_to_packet,
    setup_from_packet,
    setup_to_packet,
)
from tests.unit.kv.tiers.test_keys import LAYOUT, SECRET


def test_every_message_arrives_as_it_was_sent() -> None:
    memories = (PoolMemory(3, 4096, 8, 100), PoolMemory(4, 4096, 8, 100))
    for admitted in (None, (), ("10.0.0.0/8",)):
        setup = PoolSetup("127.0.0.1:1", "127.0.0.1", b"\0\xff", memories, admitted=admitted)
        assert setup_from_packet(setup_to_packet(setup)) == setup
    call = PoolCall(7, "get", ("a", "b"), 1, (2, 3))
    assert call_from_packet(call_to_packet(call)) == call
    reply = PoolReply(7, (True, False), "the store has failed")
    assert reply_from_packet(reply_to_packet(reply)) == reply


def test_the_largest_call_fits_into_a_packet() -> None:
    keys = PoolKeys(SECRET, LAYOUT).of_shard(
        10, Shard(range(64, 96), 2, 1), range(BATCH_BLOCKS_MAX)
    )
    slots = range(10**8, 10**8 + BATCH_BLOCKS_MAX)
    call = PoolCall(2**53, "put", tuple(keys), 99, tuple(slots))
    assert len(call_to_packet(call)) < PACKET_BYTES_MAX

"""The record of the writes of one transfer link."""

from __future__ import annotations

import base64
import time
from array import array

import numpy as np

from headrace_common.telemetry.layer_stamps import WRITES_MAX, last_write, unpack_writes
from headrace_kv.copy_plan import BlockSpan, Runs
from headrace_kv.messages import LayerRange
from headrace_kv.send.writes import LayerWrite, LinkRecord
from headrace_kv.shard_map import Edge
from headrace_kv.transport.base import Strategy, WriteResult
from tests.in_memory_transport import InMemoryTransport

NO_BLOCKS = np.zeros(0, dtype=np.int64)
HUNDRED_BYTES = Runs(np.array([0]), np.array([0]), np.array([100]))
US = 1_000
START_NS = 7 * 10**15


def write_at(
    layer: int,
    *,
    ready_us: int,
    submitted_us: int,
    landed_us: int,
    gather_us: int = 0,
    staging_us: int = 0,
    way: tuple[str, Strategy] = ("mooncake/tcp", "direct"),
) -> LayerWrite:
    """A write with times after START_NS. It has landed unless `landed_us` is 0."""
    write = LayerWrite(
        LayerRange("a", layer, 0, 4, (0, 1), START_NS + ready_us * US),
        Edge(0, 3, 0, 0, 1),
        BlockSpan(0, 4, NO_BLOCKS, 0, NO_BLOCKS, 0),
        "mooncake=10.0.0.2:77",
        HUNDRED_BYTES,
        InMemoryTransport(),
    )
    if submitted_us:
        write.start_batch()
        write.submitted_ns = START_NS + submitted_us * US
    if landed_us:
        result = WriteResult(*way, 4, gather_us * US, staging_us * US)
        write.batch_landed(result, START_NS + landed_us * US)
    return write


def record_of(*writes: tuple[LayerWrite, int], reserved_us: int = 0) -> LinkRecord:
    """A link with writes that were acknowledged at the given microseconds."""
    record = LinkRecord(writes[0][0])
    for write, now_us in writes:
        record.add_landed(write, START_NS + reserved_us * US, START_NS + now_us * US)
    return record


def test_a_link_sums_its_writes_and_keeps_their_times() -> None:
    first = write_at(0, ready_us=0, submitted_us=50, landed_us=450, gather_us=30, staging_us=7)
    second = write_at(1, ready_us=100, submitted_us=120, landed_us=600, way=("in_memory", "direct"))
    link = record_of((first, 460), (second, 601), reserved_us=40).report()
    assert (link.destination_rank, link.destination_host) == (3, "10.0.0.2")
    assert (link.transport, link.strategy) == ("mooncake/tcp+in_memory", "direct")
    assert (link.payload_bytes, link.run_count, link.entry_count, link.write_count) == (
        200,
        2,
        8,
        2,
    )
    # From 87 us, when the first write was gathered, to 600 us. The writes overlap.
    assert link.moving_ns == 513 * US
    start_ns = link.start_unix_ns
    assert link.submitted_unix_ns == start_ns + 50 * US
    assert link.ready_unix_ns == start_ns + 100 * US
    assert link.landed_unix_ns == start_ns + 600 * US
    assert link.end_unix_ns == start_ns + 601 * US
    one, two = unpack_writes(link.layers)
    times = (one.ready_ns, one.submitted_ns, one.gathered_ns, one.landed_ns)
    assert times == (0, 50 * US, 87 * US, 450 * US)
    # The waits for the lease, a staging slot and the acknowledgement.
    words = array("I", base64.b64decode(link.layers))[1:]
    assert (*words[5::12], *words[8::12], *words[11::12]) == (40, 0, 7, 0, 10, 1)
    assert (two.layer, two.ready_ns, two.landed_ns) == (1, 100 * US, 600 * US)


def test_the_start_is_by_the_wall_clock() -> None:
    ready_ns = time.monotonic_ns()
    before_ns = time.time_ns()
    write = write_at(0, ready_us=0, submitted_us=1, landed_us=2)
    write.ready_ns = ready_ns
    link = LinkRecord(write).report()
    assert before_ns - 10**9 < link.start_unix_ns <= time.time_ns()


def test_a_long_transfer_keeps_its_last_writes() -> None:
    count = 3 * WRITES_MAX
    writes = [
        (write_at(number, ready_us=number, submitted_us=number + 1, landed_us=number + 2), number)
        for number in range(count)
    ]
    link = record_of(*writes).report()
    assert (link.write_count, link.payload_bytes) == (count, 100 * count)
    kept = [write.layer for write in unpack_writes(link.layers)]
    assert kept == list(range(count - WRITES_MAX, count))


def test_a_wait_for_the_window_is_named_where_nothing_moves() -> None:
    first = write_at(0, ready_us=0, submitted_us=10, landed_us=20)
    second = write_at(1, ready_us=100, submitted_us=900, landed_us=1_000)
    second.window_wait_ns = 700 * US
    last = last_write(record_of((first, 20), (second, 1_000)).report().layers)
    assert last is not None
    assert (last.cause, last.cause_ns) == ("window", 800 * US)

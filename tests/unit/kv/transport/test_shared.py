"""One transport for all workers of a process."""

from __future__ import annotations

import ipaddress

import numpy as np
import pytest

from headrace_common.errors import QueueFull
from headrace_kv.runs import Runs
from headrace_kv.transport.factory import SharedTransport
from headrace_kv.transport.guard import Networks, parse_networks
from tests.in_memory_transport import InMemoryTransport

FIRST, SECOND = parse_networks(["10.0.0.1"]), parse_networks(["10.0.0.2"])


class Recorded(InMemoryTransport):
    """Records what it admits, and how often it was closed. It admits at most three networks."""

    def __init__(self) -> None:
        super().__init__()
        self.admissions: list[Networks | None] = []
        self.closings = 0

    def admit(self, networks: Networks | None) -> None:
        if networks is not None and len(networks) > 3:
            raise QueueFull("too many networks")
        self.admissions.append(networks)

    def close(self) -> None:
        super().close()
        self.closings += 1


class Opened:
    def __init__(self) -> None:
        self.made: list[Recorded] = []
        self.shared = SharedTransport(self.open)

    def open(self) -> Recorded:
        self.made.append(Recorded())
        return self.made[-1]


def test_all_users_have_one_session_and_reach_each_others_memory() -> None:
    opened = Opened()
    first, second = opened.shared.open(()), opened.shared.open(())
    assert first.transport is second.transport
    assert len(opened.made) == 1
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    first.transport.register(source.ctypes.data, 8)
    second.transport.register(target.ctypes.data, 8)
    runs = Runs(np.array([source.ctypes.data]), np.array([target.ctypes.data]), np.array([8]))
    assert (
        first.transport.submit(second.transport.session, runs, 1.0).result(1.0).transport
        == "in_memory"
    )
    assert np.array_equal(source, target)


def test_the_last_user_closes_it_and_a_later_one_opens_another() -> None:
    opened = Opened()
    first, second = opened.shared.open(()), opened.shared.open(())
    first.close()
    first.close()
    assert opened.made[0].closings == 0
    second.close()
    assert opened.made[0].closings == 1
    opened.shared.open(())
    assert len(opened.made) == 2


def test_it_admits_the_networks_of_all_users() -> None:
    opened = Opened()
    first, second = opened.shared.open(()), opened.shared.open(FIRST)
    (made,) = opened.made
    assert made.admissions == [(), FIRST]
    first.admit(SECOND)
    both = (*FIRST, *SECOND)
    assert made.admissions[-1] == both
    # What others have admitted changes nothing.
    second.admit(both)
    assert len(made.admissions) == 3
    second.admit(None)
    second.admit(())
    assert made.admissions[3:] == [None, SECOND]


def test_networks_that_the_transport_refuses_change_nothing() -> None:
    opened = Opened()
    first, second = opened.shared.open(FIRST), opened.shared.open(SECOND)
    (made,) = opened.made
    many = tuple(ipaddress.ip_network(f"10.{number}.0.0/16") for number in range(1, 9, 2))
    with pytest.raises(QueueFull):
        first.admit(many)
    second.admit(())
    assert made.admissions[-1] == FIRST

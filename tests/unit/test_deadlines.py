"""Deadlines that derive from a request's deadline are ordered, and settings out of order are rejected at start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace_common.config import ServiceConfig
from headrace_common.deadlines import Deadline
from headrace_common.errors import ConfigError
from headrace_common.process.settings import load_config
from headrace_decode.attempt import transfer_deadline
from headrace_decode.config import DecodeConfig
from headrace_registry.config import RegistryConfig
from headrace_router import service
from headrace_router.config import RouterConfig

# Time that remains for the answer to travel: (client, router, transfer) in seconds.
DERIVED = [
    (0.2, 0.18, 0.162),
    (1.0, 0.9, 0.81),
    (2.0, 1.8, 1.62),
    (10.0, 9.8, 9.3),
    (600.0, 599.8, 599.3),
    (1e9, 366 * 86_400 - 0.2, 366 * 86_400 - 0.7),
]


class Context:
    """An RPC with this many seconds left. None: the caller set no deadline."""

    def __init__(self, remaining_s: float | None) -> None:
        self._remaining_s = remaining_s

    def time_remaining(self) -> float | None:
        return self._remaining_s


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands still, so that all deadlines are compared at one moment."""
    monkeypatch.setattr("headrace_common.deadlines.time", SimpleNamespace(monotonic=lambda: 1.8e9))


@pytest.mark.parametrize(("client_s", "router_s", "transfer_s"), DERIVED)
def test_derived_deadlines_end_before_their_source(
    client_s: float, router_s: float, transfer_s: float
) -> None:
    router = service._deadline_of(cast("Any", Context(client_s)), 600.0)
    assert router.remaining_s() == pytest.approx(router_s, abs=0.001)
    # Decode receives the router's deadline with its RPC, prefill with its task.
    decode = Deadline.from_context(cast("Any", Context(router.remaining_s())), 600.0)
    transfer = transfer_deadline(decode)
    assert transfer.remaining_s() == pytest.approx(transfer_s, abs=0.001)
    assert (
        transfer.monotonic_s
        < decode.monotonic_s
        <= router.monotonic_s + 0.001
        < Deadline.after(client_s).monotonic_s
    )


def test_a_caller_without_a_deadline_gets_the_default() -> None:
    router = service._deadline_of(cast("Any", Context(None)), 30.0)
    assert router.remaining_s() == pytest.approx(29.8, abs=0.001)


@pytest.mark.parametrize(
    ("kind", "flags", "named"),
    [
        (
            RouterConfig,
            ["--model=sim", "--admission-wait-s=9", "--default-deadline-s=8"],
            "admission_wait_s is 9 and must be below default_deadline_s, which is 8",
        ),
        (
            DecodeConfig,
            ["--worker-id=d", "--model=sim", "--lease-ttl-s=20", "--default-deadline-s=10"],
            "lease_ttl_s is 20 and must be below default_deadline_s, which is 10; quarantine_s is 15",
        ),
        (
            RegistryConfig,
            ["--store-timeout-s=5"],
            "store_timeout_s is 5 and must be below store_start_timeout_s, which is 5",
        ),
    ],
)
def test_settings_with_waits_out_of_order_are_rejected_by_name(
    kind: type[ServiceConfig], flags: list[str], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(kind, flags, prog="headrace-test", env_prefix="HEADRACE_TEST_")

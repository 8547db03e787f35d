"""The router's warnings of pairs that cannot hand KV over."""

from __future__ import annotations

import logging

import pytest

from headrace.registry.v1 import registry_pb2
from headrace_router.prefill_queue.pairs import PairReporter
from tests.component.registry.harness import worker

PREFILL = registry_pb2.Member.ROLE_PREFILL


def members(*transports: str) -> list[registry_pb2.Member]:
    """A prefill worker with Mooncake, and a decode worker with each of these transports."""
    prefill = worker("prefill-0")
    prefill.role, prefill.transport = PREFILL, "mooncake"
    # An incarnation never changes its transport.
    decodes = [worker(f"decode-{number}-{name}") for number, name in enumerate(transports)]
    for decode, transport in zip(decodes, transports, strict=True):
        decode.role, decode.transport = registry_pb2.Member.ROLE_DECODE, transport
    return [prefill, *decodes]


def test_a_pair_is_reported_once_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    reporter = PairReporter()
    reporter.update(members("mooncake"))
    assert not caplog.messages
    for _ in range(2):
        reporter.update(members("mooncake", "in_memory"))
    # More workers of the same kind are no news.
    reporter.update(members("mooncake", "in_memory", "in_memory"))
    (line,) = caplog.messages
    reporter.update(members("mooncake", "in_memory", "other"))
    assert len(caplog.messages) == 2
    caplog.clear()
    reporter.update(members("mooncake", "in_memory"))
    assert not caplog.messages
    assert "prefill-0 cannot hand KV over to decode-1-in_memory" in line
    assert "transport (mooncake != in_memory)" in line
    reporter.update(members("mooncake"))
    reporter.update(members("mooncake", "in_memory"))
    assert len(caplog.messages) == 1


def test_an_impossible_layout_is_reported_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    broken = members("mooncake")
    del broken[1].layout.stage_starts[:]
    broken[1].layout.stage_starts.extend([3, 1])
    PairReporter().update(broken)
    assert any("the KV layout of decode-0-mooncake" in line for line in caplog.messages)

"""The slots of a vanished sender stay unused for as long as its writes may land, whatever decode's settings are."""

from __future__ import annotations

import pytest

from headrace_decode.config import DecodeConfig
from headrace_engine.worker.config import engine_config
from headrace_kv.layout import WorkerRef
from headrace_kv.leases import LateWriteGuard, QuarantinePolicy
from headrace_kv.transport.factory import open_transport
from headrace_kv.transport.staging import StagedTransport


@pytest.mark.parametrize(("lease_s", "quarantine_s"), [(5.0, 15.0), (10.0, 40.0)])
def test_a_loan_is_quarantined_for_longer_than_a_late_write_may_take(
    lease_s: float, quarantine_s: float
) -> None:
    """A lease ends after two times to live at last, and a frozen sender after half of the quarantine."""
    config = DecodeConfig.model_validate(
        {
            "model": "sim",
            "worker_id": "decode-0",
            "lease_ttl_s": lease_s,
            "quarantine_s": quarantine_s,
        }
    )
    engine = engine_config(config, role="decode", ref=WorkerRef("decode-0", "1"))
    transport = open_transport("mooncake", "127.0.0.1", "tcp", quiet_s=engine.write_quiet_s)
    try:
        assert isinstance(transport, StagedTransport)
        loan_s = transport._limits.quiet_s
    finally:
        transport.close()
    assert loan_s > 2 * lease_s + LateWriteGuard.allowed_s(quarantine_s)
    assert loan_s == QuarantinePolicy(lease_s, quarantine_s).total_s

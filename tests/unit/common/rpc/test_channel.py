"""The setting of the ping timeout."""

from __future__ import annotations

import pytest

from headrace_common.errors import ConfigError
from headrace_common.rpc.channel import PING_TIMEOUT_VARIABLE, keepalive_options


@pytest.mark.parametrize("text,timeout_ms", [("", 4_000), ("2.5", 2_500), ("1e-9", 1)])
def test_the_ping_timeout_overrides_grpcs_own(
    monkeypatch: pytest.MonkeyPatch, text: str, timeout_ms: int
) -> None:
    monkeypatch.setenv(PING_TIMEOUT_VARIABLE, text)
    options = dict(keepalive_options())
    assert options["grpc.keepalive_timeout_ms"] == timeout_ms
    assert options["grpc.http2.ping_timeout_ms"] == timeout_ms


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "3601"])
def test_an_invalid_ping_timeout_is_rejected_by_name(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(PING_TIMEOUT_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{PING_TIMEOUT_VARIABLE}: must be seconds") as refused:
        keepalive_options()
    assert repr(text) in refused.value.detail

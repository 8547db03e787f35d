"""The settings of a decode worker's HTTP API, and of the Endpoint Picker."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace_decode.config import DecodeConfig
from headrace_router.config import RouterConfig

OPEN: dict[str, Any] = {"http_listen": "10.0.0.1:8000"}


def decode_config(**settings: Any) -> DecodeConfig:
    return DecodeConfig(worker_id="d0", model="sim", **settings)


def router_config(**settings: Any) -> RouterConfig:
    return RouterConfig(model=("sim",), **settings)


def test_http_is_off_by_default() -> None:
    assert decode_config().http_listen == ""
    assert router_config().endpoint_picker_listen == ""


def test_http_needs_a_credential_of_clients() -> None:
    with pytest.raises(
        ValidationError, match=r"http_listen is 10\.0\.0\.1:8000, which other hosts"
    ):
        decode_config(**OPEN)
    assert decode_config(**OPEN, api_keys_file="keys").http_listen
    assert decode_config(**OPEN, anonymous_clients=True).http_listen
    assert decode_config(http_listen="127.0.0.1:0").http_listen


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"http_listen": "0.0.0.0:80", "api_keys_file": "keys"},
            "http_listen .* needs internal_advertise",
        ),
        (
            {"http_listen": "127.0.0.1:80", "workers_per_process": 2},
            "give http_listen the port 0",
        ),
        ({"http_listen": "127.0.0.1:0", "prefix_cache_scope": "tenant"}, "set api_keys_file"),
        ({"tool_call_parser": "other=hermes"}, "other"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        decode_config(**settings)


def test_a_picker_that_other_hosts_reach_needs_credentials() -> None:
    address: dict[str, Any] = {"endpoint_picker_listen": "10.0.0.1:9002"}
    with pytest.raises(ValidationError, match=r"endpoint_picker_listen is 10\.0\.0\.1:9002"):
        router_config(**address)
    assert router_config(token_keys_file="keys", **address).endpoint_picker_listen

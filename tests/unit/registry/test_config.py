"""Settings of the registry."""

from __future__ import annotations

import pytest

from headrace_common.config import load_config, redacted
from headrace_common.errors import ConfigError
from headrace_registry.config import RegistryConfig


def load(*arguments: str) -> RegistryConfig:
    return load_config(RegistryConfig, arguments, prog="registry", env_prefix="HEADRACE_REGISTRY_")


def test_the_defaults_need_no_etcd() -> None:
    config = load()
    assert (config.store, config.listen) == ("memory", "127.0.0.1:7001")


def test_an_etcd_address() -> None:
    assert load("--store", "etcd://etcd.example:2379").etcd_address == ("etcd.example", 2379)


@pytest.mark.parametrize(
    "flag,value",
    [
        ("--store", "etcd://nowhere"),
        ("--store", "disk"),
        ("--store-prefix", "/"),
        ("--store-prefix", "no-slash-at-the-end"),
        ("--store-prefix", "/ä/"),
        ("--history-size", "0"),
        ("--store-timeout-s", "0"),
        ("--prefix-hash-key", "too short"),
    ],
)
def test_wrong_settings_are_named(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag.removeprefix("--").replace("-", "_")):
        load(flag, value)


def test_the_secret_is_never_shown() -> None:
    secret = "long enough to be a secret"
    config = load("--prefix-hash-key", secret)
    assert 0 < config.prefix_hash_key_number < 1 << 64
    assert config.prefix_hash_key_number == load("--prefix-hash-key", secret).prefix_hash_key_number
    assert load().prefix_hash_key_number == 0
    shown = f"{redacted(config)}{config}"
    assert secret not in shown
    assert str(config.prefix_hash_key_number) not in shown
    with pytest.raises(ConfigError) as caught:
        load("--prefix-hash-key", "short secret")
    assert "short secret" not in str(caught.value)

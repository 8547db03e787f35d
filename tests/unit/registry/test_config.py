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


def test_etcd_endpoints() -> None:
    assert load("--store", "etcd://etcd.example:2379").etcd_endpoints == (("etcd.example", 2379),)
    config = load("--store", "etcd://one:2379,[::1]:2380")
    assert config.etcd_endpoints == (("one", 2379), ("[::1]", 2380))
    assert load().etcd_endpoints == ()


REMOTE, LOCAL = (
    "--store=etcd://one:2379,127.0.0.1:1",
    "--store=etcd://127.1.2.3:1,localhost:2,[::1]:3",
)
USER, PASSWORD = "--store-user=u", "--store-password-file=p"
AUTHORITY, CERTIFICATE, KEY = (
    f"--store-tls-{name}-file=f" for name in ("authority", "certificate", "key")
)


@pytest.mark.parametrize(
    "flags",
    [
        (LOCAL, USER, PASSWORD),
        (REMOTE, USER, PASSWORD, AUTHORITY),
        (REMOTE, AUTHORITY),
        (REMOTE, AUTHORITY, CERTIFICATE, KEY),
    ],
)
def test_security_of_etcd(flags: tuple[str, ...]) -> None:
    load(*flags)


@pytest.mark.parametrize(
    "flags,named",
    [
        ((AUTHORITY,), "need store"),
        ((USER, PASSWORD), "need store"),
        ((REMOTE, USER, PASSWORD), "in clear"),
        ((LOCAL, USER), "store_password_file"),
        ((LOCAL, PASSWORD), "store_user"),
        ((LOCAL, AUTHORITY, KEY), "store_tls_certificate_file"),
        ((LOCAL, AUTHORITY, CERTIFICATE), "store_tls_key_file"),
        ((LOCAL, CERTIFICATE, KEY), "store_tls_authority_file"),
    ],
)
def test_incomplete_security_of_etcd_is_named(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(*flags)


@pytest.mark.parametrize(
    "flag,value",
    [
        ("--store", "etcd://nowhere"),
        ("--store", "disk"),
        ("--store", "etcd://"),
        ("--store", "etcd://one:2379,"),
        ("--store", "etcd://one:2379,two:0"),
        ("--store", "etcd://one:2379,one:2379"),
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

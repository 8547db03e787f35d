"""Settings of the registry."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_common.errors import ConfigError
from headrace_common.process.settings import load_config, redacted
from headrace_registry.config import RegistryConfig


def load(*arguments: str) -> RegistryConfig:
    return load_config(RegistryConfig, arguments, prog="registry", env_prefix="HEADRACE_REGISTRY_")


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
    ],
)
def test_wrong_settings_are_named(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=flag.removeprefix("--").replace("-", "_")):
        load(flag, value)


SECRET = "long enough to be a secret"


def test_the_secret_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_REGISTRY_PREFIX_HASH_KEY", SECRET)
    config = load()
    key = config.read_prefix_hash_key()
    assert 0 < key < 1 << 64
    shown = f"{redacted(config)}{config}"
    assert SECRET not in shown
    assert str(key) not in shown
    monkeypatch.setenv("HEADRACE_REGISTRY_PREFIX_HASH_KEY", "short secret")
    with pytest.raises(ConfigError, match="at least 16 characters") as caught:
        load()
    assert "short secret" not in str(caught.value)


def test_secrets_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    assert load().read_prefix_hash_key() == 0
    from_file = load(f"--prefix-hash-key-file={path}")
    monkeypatch.setenv("HEADRACE_REGISTRY_PREFIX_HASH_KEY", SECRET)
    assert from_file.read_prefix_hash_key() == load().read_prefix_hash_key() != 0


def test_a_wrong_file_of_a_secret_is_named(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    config = load(f"--prefix-hash-key-file={path}")
    with pytest.raises(ConfigError, match=r"prefix_hash_key_file .* cannot be read"):
        config.read_prefix_hash_key()
    path.write_text("short secret")
    with pytest.raises(ConfigError, match=r"prefix_hash_key_file .* too short") as caught:
        config.read_prefix_hash_key()
    assert "short secret" not in str(caught.value)


def test_a_secret_is_given_in_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    name, flag = "prefix_hash_key", "--prefix-hash-key"
    monkeypatch.setenv(f"HEADRACE_REGISTRY_{name.upper()}", SECRET)
    with pytest.raises(ConfigError, match=f"set {name} or {name}_file"):
        load(f"{flag}-file=secret")

"""API keys: which headers may contain them, what is rejected, and that no message reveals one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace_common import reloading
from headrace_common.errors import ConfigError, Unauthenticated
from headrace_frontend.tenants import DEFAULT_TENANT, load_tenants

_KEY = "hr-secret-1"


def _file(folder: Path, text: str, name: str = "keys.txt") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_without_a_file_all_callers_are_one_tenant() -> None:
    tenants = load_tenants("")
    assert tenants.tenant_of(None) == DEFAULT_TENANT
    assert tenants.tenant_of([("authorization", "Bearer whatever")]) == DEFAULT_TENANT


@pytest.mark.parametrize(
    "name,text",
    [
        ("keys.txt", f"# ours\n\n{_KEY} chat  # the front end\nother batch\n"),
        ("keys.toml", f'# ours\n"{_KEY}" = "chat"\nother = "batch"\n'),
        ("keys.txt", f"sha256:{hashlib.sha256(_KEY.encode()).hexdigest()} chat\nother batch\n"),
    ],
)
def test_keys_name_tenants(tmp_path: Path, name: str, text: str) -> None:
    tenants = load_tenants(_file(tmp_path, text, name))
    for metadata in (
        [("authorization", f"Bearer {_KEY}")],
        [("user-agent", "x"), ("authorization", f"bearer  {_KEY} ")],
        [("x-api-key", _KEY)],
        [("authorization", "Basic abc"), ("x-api-key", _KEY.encode())],
    ):
        assert tenants.tenant_of(metadata) == "chat"
    assert tenants.tenant_of([("x-api-key", "other")]) == "batch"


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("authorization", _KEY)],
        [("authorization", "Bearer")],
        [("x-api-key", "")],
        [("x-api-key", _KEY + "x")],
        [("x-api-key", hashlib.sha256(_KEY.encode()).hexdigest())],
        [("x-api-key", "k" * 100_000)],
    ],
)
def test_unknown_keys_are_rejected_with_the_remedy_only(
    tmp_path: Path, metadata: list[tuple[str, str]] | None
) -> None:
    tenants = load_tenants(_file(tmp_path, f"{_KEY} chat\n"))
    with pytest.raises(Unauthenticated, match="x-api-key: KEY") as caught:
        tenants.tenant_of(metadata)
    assert _KEY not in caught.value.detail
    assert caught.value.retry_after_s is None


@pytest.mark.parametrize(
    "name,text,words",
    [
        ("keys.txt", f"{_KEY}\n", "line 1: write it as KEY TENANT"),
        ("keys.txt", f"a chat\n{_KEY} Not Good\n", "line 2: write it as"),
        ("keys.txt", f"{_KEY} Chat\n", "line 1: name the tenant"),
        ("keys.txt", f"{_KEY} a\n{_KEY} b\n", "line 2: the key belongs to two tenants"),
        ("keys.txt", "# nothing\n", "names no key"),
        ("keys.toml", f'"{_KEY}" = \n', "is not TOML"),
        ("keys.toml", f'"{_KEY}" = 3\n', "entry 1: write it as"),
    ],
)
def test_an_error_in_the_file_names_the_file_and_no_key(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = _file(tmp_path, text, name)
    with pytest.raises(ConfigError, match=words) as caught:
        load_tenants(path)
    assert path in caught.value.detail
    assert _KEY not in caught.value.detail


def test_an_error_names_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tenants(str(tmp_path / "absent"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tenants(str(tmp_path / "binary"))


def test_a_changed_file_adds_and_removes_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reloading, "CHECK_INTERVAL_S", 0.0)
    tenants = load_tenants(_file(tmp_path, f"{_KEY} chat\n"))
    _file(tmp_path, f"{_KEY} chat\nhr-secret-22 batch\n")
    assert tenants.tenant_of([("x-api-key", "hr-secret-22")]) == "batch"
    _file(tmp_path, "hr-secret-22 batch\n")
    with pytest.raises(Unauthenticated):
        tenants.tenant_of([("x-api-key", _KEY)])
    _file(tmp_path, "hr-secret-22\n")
    assert tenants.tenant_of([("x-api-key", "hr-secret-22")]) == "batch"
    assert "keys.txt, line 1" in caplog.text
    assert "hr-secret" not in caplog.text

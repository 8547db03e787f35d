"""The salt of each tenant, and the settings that decide whether there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace_frontend.tenants import CacheSalts
from headrace_router.config import RouterConfig

KEY = 0x5EC2E7


def salts_of(*tenants: str, key: int = KEY, by_tenant: bool = True) -> list[str]:
    salts = CacheSalts(by_tenant=by_tenant, prefix_hash_key=lambda: key)
    return [salts.salt_of(tenant) for tenant in tenants]


def test_routers_of_a_deployment_give_a_tenant_one_salt() -> None:
    first, again, other = salts_of("tenant-a", "tenant-a", "tenant-b")
    assert first == again != other
    assert salts_of("tenant-a") == [first]
    assert salts_of("tenant-a", key=KEY + 1) != [first]
    assert salts_of("tenant-a", "tenant-b", by_tenant=False) == ["", ""]


def test_before_the_key_is_known_tenants_are_separate_too() -> None:
    first, again, other = salts_of("tenant-a", "tenant-a", "tenant-b", key=0)
    assert first == again != other
    # It is secret: another router, or a caller that knows of no key, does not find it.
    assert salts_of("tenant-a", key=0) != [first]


@pytest.mark.parametrize(
    ("scope", "with_keys", "separate"),
    [
        ("auto", False, False),
        ("auto", True, True),
        ("shared", False, False),
        ("shared", True, False),
        ("tenant", True, True),
    ],
)
def test_tenants_are_separate_by_default_once_there_are_keys(
    scope: str, with_keys: bool, separate: bool, tmp_path: Path
) -> None:
    keys = str(tmp_path / "keys") if with_keys else ""
    settings: dict[str, Any] = {"model": "sim", "api_keys_file": keys, "prefix_cache_scope": scope}
    assert RouterConfig(**settings).separates_tenants is separate


def test_tenants_without_keys_are_refused() -> None:
    settings: dict[str, Any] = {"model": "sim", "prefix_cache_scope": "tenant"}
    with pytest.raises(ValidationError, match="set api_keys_file"):
        RouterConfig(**settings)

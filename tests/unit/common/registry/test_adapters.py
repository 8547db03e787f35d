"""What workers may announce as adapters."""

from __future__ import annotations

import pytest

from headrace.inference.v1 import adapter_pb2
from headrace_common.registry.adapters import (
    ADAPTERS_MAX,
    Adapter,
    adapter_to_proto,
    adapters_from_proto,
    announced_violations,
)


def test_an_adapter_survives_the_message() -> None:
    adapters = {Adapter("poet", "0a"), Adapter("poet", "0b")}
    assert adapters_from_proto(map(adapter_to_proto, adapters)) == adapters


@pytest.mark.parametrize(
    ("name", "digest", "field"),
    [
        ("", "aa", "name"),
        ("a b", "aa", "name"),
        ("x" * 64, "aa", "name"),
        ("é", "aa", "name"),
        ("poet", "", "digest"),
        ("poet", "AA", "digest"),
        ("poet", "a" * 65, "digest"),
    ],
)
def test_a_wrong_name_or_digest_is_named(name: str, digest: str, field: str) -> None:
    right = adapter_pb2.Adapter(name="x" * 63, digest="0123456789abcdef" * 4)
    wrong = adapter_pb2.Adapter(name=name, digest=digest)
    assert list(announced_violations([right, wrong], "adapters")) == [f"adapters[1].{field}"]


def test_each_name_is_announced_once_and_their_number_is_bounded() -> None:
    many = [adapter_pb2.Adapter(name=f"a{n}", digest="0") for n in range(ADAPTERS_MAX)]
    assert not announced_violations(many, "adapters")
    again = announced_violations([*many[1:], many[1]], "adapters")
    assert again == {f"adapters[{ADAPTERS_MAX - 1}].name": "give each name once"}
    assert list(announced_violations([*many, many[0]], "adapters")) == ["adapters"]

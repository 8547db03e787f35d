"""What workers may announce as adapters."""

from __future__ import annotations

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


def test_each_name_is_announced_once_and_their_number_is_bounded() -> None:
    many = [adapter_pb2.Adapter(name=f"a{n}", digest="0") for n in range(ADAPTERS_MAX)]
    assert not announced_violations(many, "adapters")
    again = announced_violations([*many[1:], many[1]], "adapters")
    assert again == {f"adapters[{ADAPTERS_MAX - 1}].name": "give each name once"}
    assert list(announced_violations([*many, many[0]], "adapters")) == ["adapters"]

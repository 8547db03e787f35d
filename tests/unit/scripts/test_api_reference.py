"""The API reference has every RPC, field and enum value of every proto."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from api_reference import PROTOS, compile_protos, enums_of, messages_of, render

FILES = compile_protos(PROTOS)
PAGES = render(FILES)


def section(page: str, heading: str) -> str:
    text = page.partition(f"\n{heading}\n")[2]
    assert text, f"the page has no {heading!r}"
    return text.partition("\n## ")[0]


@pytest.mark.parametrize("file", FILES.file, ids=lambda file: str(file.name))
def test_every_rpc_field_and_value_is_on_the_page(file: FileDescriptorProto) -> None:
    page = PAGES[file.package]
    for service in file.service:
        for method in service.method:
            assert section(page, f"### {service.name}.{method.name}").strip()
    for message in messages_of(file):
        rows = section(page, f"## {message.name}")
        for field in message.descriptor.field:
            assert f"| {field.number} | `{field.name}` |" in rows
    for enum in enums_of(file):
        rows = section(page, f"## {enum.name}")
        for value in enum.descriptor.value:
            assert f"| {value.number} | `{value.name}` |" in rows

"""The API reference has every RPC, field and enum value of every proto, with its comment."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

import api_reference
from api_reference import PROTOS, compile_protos, enums_of, messages_of, render

NAMES = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))


@cache
def descriptors() -> FileDescriptorSet:
    return compile_protos(PROTOS)


@cache
def pages() -> dict[str, str]:
    return render(descriptors())


def file_named(name: str) -> FileDescriptorProto:
    return next(file for file in descriptors().file if file.name == name)


def section(page: str, heading: str) -> list[str]:
    text = page.partition(f"\n{heading}\n")[2]
    assert text, f"the page has no {heading!r}"
    return re.split(r"\n##+ ", text)[0].strip().splitlines()


def test_every_proto_is_compiled() -> None:
    assert NAMES
    assert sorted(file.name for file in descriptors().file) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_rpc_has_its_types_and_comment(name: str) -> None:
    file = file_named(name)
    source = (PROTOS / name).read_text(encoding="utf-8")
    declared = re.findall(r"^  rpc (\w+)\(", source, re.MULTILINE)
    assert [method.name for service in file.service for method in service.method] == declared
    for service in file.service:
        for method in service.method:
            signature, _, *comment = section(
                pages()[file.package], f"### {service.name}.{method.name}"
            )
            assert method.input_type.rpartition(".")[2] in signature
            assert method.output_type.rpartition(".")[2] in signature
            assert signature.count("stream ") == (method.client_streaming + method.server_streaming)
            assert comment


@pytest.mark.parametrize("name", NAMES)
def test_every_field_and_enum_value_has_a_row_with_its_comment(name: str) -> None:
    file = file_named(name)
    page = pages()[file.package]
    for message in messages_of(file):
        lines = section(page, f"## {message.name}")
        assert not lines[0].startswith("|")
        for field in message.descriptor.field:
            row = rf"\| {field.number} \| `{field.name}` \| .+ \| .+ \|"
            assert any(re.fullmatch(row, line) for line in lines), f"{message.name}.{field.name}"
    for enum in enums_of(file):
        lines = section(page, f"## {enum.name}")
        assert not lines[0].startswith("|")
        for value in enum.descriptor.value:
            row = rf"\| {value.number} \| `{value.name}` \| .+ \|"
            assert any(re.fullmatch(row, line) for line in lines), f"{enum.name}.{value.name}"


def test_links_lead_to_headings() -> None:
    headings = {
        package: {heading.replace(".", "").lower() for heading in re.findall(r"^##+ (.+)$", page, re.MULTILINE)}
        for package, page in pages().items()
    }  # fmt: skip
    links = [
        (target.removesuffix(".md") or package, anchor)
        for package, page in pages().items()
        for target, anchor in re.findall(r"\]\(([\w.]*)#(\w+)\)", page)
    ]
    assert links
    assert [link for link in links if link[1] not in headings[link[0]]] == []


def test_labels_of_fields(tmp_path: Path) -> None:
    (tmp_path / "kiln.proto").write_text(
        """syntax = "proto3";
package headrace.kiln.v1;
// A load.
message Load {
  // Weights | by tile.
  map<string, double> weights = 1;
  // Tiles.
  repeated Tile tiles = 2;
  // Heat.
  optional uint32 heat = 3;
  // One of two.
  oneof colour {
    // Red.
    bool red = 4;
  }
  // A tile.
  message Tile {}
}
""",
        encoding="utf-8",
    )
    page = render(compile_protos(tmp_path))["headrace.kiln.v1"]
    assert section(page, "## Load")[-4:] == [
        "| 1 | `weights` | map of string to double | Weights \\| by tile. |",
        "| 2 | `tiles` | repeated [Load.Tile](#loadtile) | Tiles. |",
        "| 3 | `heat` | optional uint32 | Heat. |",
        "| 4 | `red` | bool, one of `colour` | Red. |",
    ]
    assert section(page, "## Load.Tile") == ["A tile.", "", "No fields."]


def test_pages_are_written_to_the_given_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["api_reference.py", str(tmp_path / "api")])
    assert api_reference.main() == 0
    written = {path.stem: path.read_text(encoding="utf-8") for path in (tmp_path / "api").iterdir()}
    assert written == pages()

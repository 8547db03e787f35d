"""Options of the protos for generated code in other languages."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

PROTOS = Path(__file__).resolve().parents[2] / "protos"
NAMES = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))


def wanted_options(name: str) -> dict[str, object]:
    """The options of a proto, from its path."""
    _, area, version, file = Path(name).parts
    words = file.removesuffix(".proto").split("_")
    return {
        "go_package": f"headrace/{area}/{version};{area}{version}",
        "java_package": f"headrace.{area}.{version}",
        "java_multiple_files": True,
        "java_outer_classname": "".join(word.capitalize() for word in words) + "Proto",
    }


@pytest.mark.parametrize("name", NAMES)
def test_options_follow_from_the_path(name: str) -> None:
    module = importlib.import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    descriptor: FileDescriptor = module.DESCRIPTOR
    options = descriptor.GetOptions()
    wanted = wanted_options(name)
    assert {field: getattr(options, field) for field in wanted} == wanted

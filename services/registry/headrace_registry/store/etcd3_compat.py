"""Makes the `etcd3` package importable with a current protobuf.

protobuf 4 and later reject its generated modules. The descriptors inside them are valid, so this
module reads them from the source without running it. Modules built from them replace the generated
ones.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pool, message_factory

from headrace_common.extras import install_command

# In the order of their imports.
_GENERATED = ("kv_pb2", "auth_pb2", "rpc_pb2")


@cache
def load_etcd3() -> Any:
    """The `etcd3` package, untyped. Raises ImportError when it is missing or not as expected."""
    specification = importlib.util.find_spec("etcd3")
    if specification is None or specification.origin is None:
        raise ImportError(
            f"the etcd store needs the extra etcd: {install_command('etcd')}", name="etcd3"
        )
    folder = Path(specification.origin).parent / "etcdrpc"
    # Not the default pool: another package may have registered files named rpc.proto or kv.proto.
    pool = descriptor_pool.DescriptorPool()
    for name in _GENERATED:
        file = pool.AddSerializedFile(_serialized_descriptor(folder / f"{name}.py"))
        qualified_name = f"etcd3.etcdrpc.{name}"
        sys.modules[qualified_name] = _module_of(qualified_name, file)
    return importlib.import_module("etcd3")


def _serialized_descriptor(path: Path) -> bytes:
    """The serialized FileDescriptorProto inside a generated module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            # Code for Python 2 and 3 wraps the text as _b('...').
            literal = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            value = ast.literal_eval(literal)
            return value if isinstance(value, bytes) else str(value).encode("latin-1")
    raise ImportError(f"{path} holds no serialized descriptor", path=str(path))


def _module_of(qualified_name: str, file: Any) -> ModuleType:
    module = ModuleType(qualified_name)
    module.__dict__["DESCRIPTOR"] = file
    for name, descriptor in file.message_types_by_name.items():
        module.__dict__[name] = message_factory.GetMessageClass(descriptor)
    for enumeration in file.enum_types_by_name.values():
        for value in enumeration.values:
            module.__dict__[value.name] = value.number
    return module

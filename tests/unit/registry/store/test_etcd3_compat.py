"""The etcd3 package under a current protobuf."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_registry.store.etcd_connection import _serialized_descriptor, load_etcd3


def test_messages_can_be_serialized() -> None:
    messages = load_etcd3().etcdrpc
    request = messages.TxnRequest(
        compare=[messages.Compare(key=b"k", target=messages.Compare.MOD, mod_revision=7)],
        success=[messages.RequestOp(request_put=messages.PutRequest(key=b"k", value=b"v"))],
    )
    copy = messages.TxnRequest.FromString(request.SerializeToString())
    assert copy.compare[0].mod_revision == 7
    assert copy.success[0].request_put.value == b"v"


def test_a_client_of_the_one_package_can_be_made_without_a_server() -> None:
    assert load_etcd3() is load_etcd3()
    load_etcd3().client(host="127.0.0.1", port=1, timeout=1).close()


def test_a_module_without_a_descriptor_is_rejected(tmp_path: Path) -> None:
    module = tmp_path / "kv_pb2.py"
    module.write_text("NOTHING = 1\n")
    with pytest.raises(ImportError, match="holds no serialized descriptor"):
        _serialized_descriptor(module)

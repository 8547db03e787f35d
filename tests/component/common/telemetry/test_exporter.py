"""Exports of spans after a change of certificates."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SpanExportResult

from headrace_common import reloading
from headrace_common.access.credentials import TlsFiles
from headrace_common.config import ServiceConfig
from headrace_common.rpc.server import GrpcServer
from headrace_common.telemetry.exporter import CollectorExporter
from tests.collector import SpanReceiver
from tests.suite.certificates import Authority
from tests.waiting import until


async def _serving(files: TlsFiles, listen: str = "127.0.0.1:0") -> tuple[GrpcServer, str]:
    server = GrpcServer(ServiceConfig(internal_listen=listen, **asdict(files)), ())
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        SpanReceiver(), server.server
    )
    return server, await server.start()


def _copy(new: TlsFiles, old: TlsFiles) -> None:
    for field, path in asdict(new).items():
        Path(path).replace(getattr(old, field))


async def test_spans_reach_a_collector_with_a_certificate_of_a_new_authority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "CHECK_INTERVAL_S", 0.0)
    old = Authority(tmp_path / "old").sign("all", "prefill")
    server, address = await _serving(old)
    exporter = CollectorExporter(ServiceConfig(**asdict(old)))
    exporter.set_endpoints([address])

    async def exported() -> bool:
        return await asyncio.to_thread(exporter.export, ()) is SpanExportResult.SUCCESS

    try:
        assert await exported()
        await server.server.stop(None)
        _copy(Authority(tmp_path / "new").sign("all", "prefill"), old)
        server, _ = await _serving(old, address)
        await until(exported)
    finally:
        exporter.shutdown()
        await server.server.stop(None)

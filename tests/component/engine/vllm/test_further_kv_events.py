"""Readers beside the worker get vLLM's KV events as vLLM sends them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import zmq.asyncio

from headrace_common.errors import ConfigError
from headrace_engine.vllm.service.kv_events import KvEventReader
from tests.ports import free_port


async def test_events_are_sent_on_as_they_are(tmp_path: Path) -> None:
    inner, outer = f"ipc://{tmp_path}/events", f"tcp://127.0.0.1:{free_port()}"
    also: Any = SimpleNamespace(
        endpoint=outer.replace("127.0.0.1", "*"), topic="kv@pod@model", hwm=10
    )
    context = zmq.asyncio.Context()
    vllm, other = context.socket(zmq.PUB), context.socket(zmq.SUB)
    vllm.bind(inner)
    reader, second = (KvEventReader(inner, Mock(), also) for _ in range(2))
    reader.start()
    try:
        other.connect(outer)
        other.subscribe(b"kv@")
        payload = msgspec.msgpack.encode([1.5, []])

        async def publish() -> None:
            # Subscriptions arrive after the first ones.
            for number in range(1_000):
                await vllm.send_multipart([b"", number.to_bytes(8), payload])
                await asyncio.sleep(0.01)

        publishing = asyncio.create_task(publish())
        topic, number, found = await asyncio.wait_for(other.recv_multipart(), 30)
        assert (topic, found) == (b"kv@pod@model", payload)
        _, after, _ = await asyncio.wait_for(other.recv_multipart(), 30)
        publishing.cancel()
        assert int.from_bytes(after) == int.from_bytes(number) + 1
        with pytest.raises(ConfigError, match="in use"):
            second.start()
    finally:
        await reader.close()
        await second.close()
        context.destroy(linger=0)

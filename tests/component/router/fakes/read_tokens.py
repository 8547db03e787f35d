"""The tokens that callers of decode workers have read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from headrace.decode.v1 import decode_pb2, decode_pb2_grpc
from tests.waiting import until

_Stub = decode_pb2_grpc.DecodeServiceStub


class ReadTokens:
    """Counts the tokens of all decode workers that the callers of this process have read.

    gRPC drops messages of a broken connection that the caller has not read. A fake worker waits for this count before
    it breaks the connection.
    """

    def __init__(self) -> None:
        self.count = 0

    def stub(self, channel: grpc.aio.Channel) -> _Stub:
        """Replaces the stub of DecodeService. It counts the tokens of every message that it returns."""
        counting: Any = _CountingChannel(channel, self._add)
        stub: _Stub = _Stub(counting)
        return stub

    def _add(self, message: decode_pb2.LinkResponse) -> None:
        self.count += len(message.tokens.token_ids)
        self.count += sum(len(one.tokens.token_ids) for one in message.tokens_with_logprobs)

    async def reach(self, count: int) -> None:
        """Waits until so many tokens have been read."""
        await until(lambda: self.count >= count, what=lambda: f"{self.count} of {count} tokens")


class _CountingChannel:
    """A channel that reports each message of a stream as its caller reads it."""

    def __init__(self, channel: grpc.aio.Channel, on_message: Callable[[Any], None]) -> None:
        self._channel = channel
        self._on_message = on_message
        self.unary_unary = channel.unary_unary

    def stream_stream(self, method: str, **options: Any) -> Any:
        return self._channel.stream_stream(method, **self._reporting(options))

    def _reporting(self, options: dict[str, Any]) -> dict[str, Any]:
        deserialize = options["response_deserializer"]

        def deserialize_and_report(payload: bytes) -> Any:
            message = deserialize(payload)
            self._on_message(message)
            return message

        return {**options, "response_deserializer": deserialize_and_report}

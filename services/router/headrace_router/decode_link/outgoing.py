"""What a router has not sent yet on one link, joined into few messages. Pure."""

from __future__ import annotations

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2

# Most bytes of a credit or a cancel.
_ENTRY_BYTES = 24
# Most bytes of the lengths around an open and its tokens, and of a token.
_OPEN_BYTES = 24
_TOKEN_BYTES = 5


class OutgoingRequests:
    """Opens, credits, cancels and the interval between tokens that wait for the next message."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: the size from which messages are split. A single open may be longer."""
        self._bytes_max = bytes_max
        self._opens: dict[int, tuple[decode_pb2.LinkOpen, inference_pb2.TokenIds]] = {}
        self._credits: dict[int, int] = {}
        self._cancels: list[int] = []
        self._interval_us = 0
        self._sent_interval_us = 0

    def set_token_interval(self, interval_us: int) -> bool:
        """Lets the worker join tokens for so long, from the next message on.

        Returns whether the worker must know soon: it joins them for twice as long now, or for half as long.
        """
        self._interval_us = interval_us
        low, high = sorted((interval_us, self._sent_interval_us))
        return high >= 2 * low and high > 0

    def open(self, opened: decode_pb2.LinkOpen, token_ids: inference_pb2.TokenIds) -> None:
        """Adds a request, and its tokens. Ids must increase."""
        self._opens[opened.stream_id] = opened, token_ids

    def grant(self, stream_id: int, credit_tokens: int) -> None:
        """Adds to the credit of a request."""
        self._credits[stream_id] = self._credits.get(stream_id, 0) + credit_tokens

    def cancel(self, stream_id: int) -> None:
        """Cancels a request. One that was not sent yet is forgotten."""
        self._credits.pop(stream_id, None)
        if self._opens.pop(stream_id, None) is None:
            self._cancels.append(stream_id)

    def next_message(self) -> decode_pb2.LinkRequest | None:
        """The next message, with as much as fits. None when nothing waits.

        Credits and cancels are for requests that were opened before, so they go first.
        """
        message = decode_pb2.LinkRequest()
        room_bytes = self._bytes_max
        if self._interval_us != self._sent_interval_us:
            message.token_interval_us = self._sent_interval_us = self._interval_us
            room_bytes -= _ENTRY_BYTES
        while self._credits and room_bytes > 0:
            stream_id, tokens = self._credits.popitem()
            message.credits.add(stream_id=stream_id, credit_tokens=tokens)
            room_bytes -= _ENTRY_BYTES
        fitting = max(0, room_bytes // _ENTRY_BYTES)
        message.cancelled_stream_ids.extend(self._cancels[:fitting])
        room_bytes -= _ENTRY_BYTES * min(fitting, len(self._cancels))
        del self._cancels[:fitting]
        while self._opens:
            stream_id = next(iter(self._opens))
            opened, token_ids = self._opens[stream_id]
            open_bytes = opened.ByteSize() + _OPEN_BYTES + _TOKEN_BYTES * len(token_ids.ids)
            if open_bytes > room_bytes and room_bytes < self._bytes_max:
                break
            del self._opens[stream_id]
            message.opens.append(opened)
            message.opens[-1].request.token_ids.MergeFrom(token_ids.ids)
            room_bytes -= open_bytes
        return None if room_bytes == self._bytes_max else message

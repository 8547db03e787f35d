"""Token ids in messages, without a Python step for each token.

The library copies a message by encoding and decoding it, which takes milliseconds for 100,000 tokens. So the tokens of
a prompt are beside their message until it is sent. Between two messages they are copied as memory.
"""

from __future__ import annotations

from array import array
from typing import Any, Final, Protocol

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.containers import RepeatedScalarFieldContainer
from google.protobuf.wrappers_pb2 import BytesValue

from headrace.inference.v1 import inference_pb2


class HasTokenIds(Protocol):
    """A message with tokens."""

    @property
    def token_ids(self) -> RepeatedScalarFieldContainer[int]:
        """The tokens."""
        ...


def _words_class() -> Any:
    """A message with `repeated fixed32 ids = 1`. On the wire it looks like a BytesValue with the words."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="headrace/words.proto", syntax="proto3")
    words = file.message_type.add(name="Words")
    words.field.add(name="ids", number=1, type=field.TYPE_FIXED32, label=field.LABEL_REPEATED)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Words"))


_WORDS: Final = _words_class()


def token_ids_message(words: array[int]) -> inference_pb2.TokenIds:
    """The tokens of an array of type "I"."""
    found = inference_pb2.TokenIds()
    found.ids.MergeFrom(
        _WORDS.FromString(BytesValue(value=words.tobytes()).SerializeToString()).ids
    )
    return found


def detach_token_ids(message: HasTokenIds) -> inference_pb2.TokenIds:
    """Moves the tokens out of a message."""
    found = inference_pb2.TokenIds(ids=message.token_ids)
    del message.token_ids[:]
    return found

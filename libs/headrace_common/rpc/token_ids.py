"""Token ids in messages, without a Python step for each token.

The library copies a message by encoding and decoding it, which takes milliseconds for 100,000 tokens. So the tokens of
a prompt are beside their message until it is sent. Between two messages they are copied as memory.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.wrappers_pb2 import BytesValue

from headrace.inference.v1 import inference_pb2


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
    """The tokens of an array of type "I", in a message with the same field."""
    found: inference_pb2.TokenIds = _WORDS.FromString(
        BytesValue(value=words.tobytes()).SerializeToString()
    )
    return found

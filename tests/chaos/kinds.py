"""The kinds of requests in a mixed run: what each sends, and the tokens of its prompt.

The virtual machines of tests/rdma have no tokenizers and no pictures, so only a mixed run imports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from headrace.inference.v1 import image_pb2, inference_pb2, sampling_pb2
from headrace_common.registry.adapters import Adapter
from headrace_kv.prefix.images import hashed_token_ids
from tests.chaos.plan import ADAPTER, ChaosRequest, Kind

if TYPE_CHECKING:
    from headrace_text.codec import TextCodec

_KEEP_S = 5
_VOCABULARY = 32_000
_CONTEXT = 8_192
_SIZES = ((56, 84), (140, 56), (84, 84))


class ModelFolder:
    """The files of a model with images, in a folder that routers and clients read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder

    def write(self) -> None:
        """Before a router starts."""
        from tests.image_models import QWEN, write_image_model

        self.path.mkdir(parents=True)
        write_image_model(self.path, {**QWEN, "vocab_size": _VOCABULARY})

    @cached_property
    def codec(self) -> TextCodec:
        from headrace_text.load import load_codecs

        return load_codecs({"sim": str(self.path)})["sim"]

    def prompt_of(self, request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        """The tokens that the router makes of a request."""
        if not request.HasField("chat"):
            return tuple(request.tokens.ids)
        from tests.kit.requests import prepared

        chat = prepared(inference_pb2.GenerateRequest(chat=request.chat), self.codec, _CONTEXT)
        # The simulated model sees the contents of images.
        return tuple(hashed_token_ids(chat.token_ids, chat.images))


@cache
def _image(number: int) -> image_pb2.Image:
    """One of a few. Equal ones have equal prefixes."""
    from tests.image_models import image_file

    return image_pb2.Image(data=image_file(*_SIZES[number]))


def adapter_of(request: ChaosRequest) -> Adapter | None:
    """The adapter that a request's answer is made with."""
    name, _, digest = ADAPTER.partition(":")
    return Adapter(name, digest) if request.kind is Kind.ADAPTER else None


def to_proto(request: ChaosRequest) -> inference_pb2.GenerateRequest:
    """The request as a client sends it. That of a conversation is its first turn."""
    sampling = sampling_pb2.SamplingParams(
        temperature=0.0, max_tokens=request.answer_tokens, ignore_eos=True
    )
    name = f"turn-{request.number}"
    sent = inference_pb2.GenerateRequest(sampling=sampling, request_id=name)
    if request.kind is Kind.IMAGE:
        parts = [
            image_pb2.ContentPart(image=_image(request.number % len(_SIZES))),
            image_pb2.ContentPart(text=_text_of(request.prompt)),
        ]
        sent.chat.messages.add(role="user", parts=parts)
    elif request.kind is Kind.CONVERSATION:
        sent.chat.messages.add(role="user", content=_text_of(request.prompt))
        sent.store = True
    else:
        sent.tokens.ids.extend(request.prompt)
    if request.kind is Kind.PROMISE:
        sent.keep.CopyFrom(Duration(seconds=_KEEP_S))
    if request.kind is Kind.ADAPTER:
        sent.model = ADAPTER.partition(":")[0]
    return sent


def second_turn(
    first: inference_pb2.GenerateRequest, answer: str
) -> tuple[inference_pb2.GenerateRequest, inference_pb2.GenerateRequest]:
    """The next turn of a stored conversation, as it is sent, and with all its messages."""
    sent = inference_pb2.GenerateRequest(sampling=first.sampling, resume=first.request_id)
    whole = inference_pb2.GenerateRequest(sampling=first.sampling, chat=first.chat)
    whole.chat.messages.add(role="assistant", content=answer)
    for turn in (sent, whole):
        turn.request_id = f"{first.request_id}-2"
        turn.chat.messages.add(role="user", content="and then?")
    return sent, whole


def _text_of(prompt: Sequence[int]) -> str:
    return " ".join(map(str, prompt))

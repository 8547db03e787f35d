"""The responses of /v1/completions, which have the text of a prompt and where each token begins in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_frontend.openai.requests import Includes
from headrace_frontend.openai.responses import (
    CHOICES_ALONE,
    FINISH_REASONS,
    CollectedChoice,
    ResponseFormat,
    ResponseHead,
    quote,
)
from headrace_frontend.openai.tokens import PromptOffsets, TextOffsets
from headrace_text.codec import TextCodec


class CompletionFormat(ResponseFormat):
    """The responses of /v1/completions."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    text_field = ('"text": ', "")
    lists_beside_top = True

    def __init__(
        self,
        head: ResponseHead,
        codec: TextCodec,
        *,
        includes: Includes = CHOICES_ALONE,
        skip_special_tokens: bool = True,
        alternatives: int = 0,
    ) -> None:
        """`alternatives`: the number of them that the logprobs have beside each token."""
        super().__init__(head, codec, includes=includes)
        self._skip_special_tokens = skip_special_tokens
        self._alternatives = alternatives
        self._offsets: dict[int, TextOffsets] = {}
        self._prompt_offsets: dict[int, PromptOffsets] = {}
        self._begun: set[int] = set()

    def first_event(self, index: int) -> bytes:
        text = self._prompt_text(index)
        return self.event(index, inference_pb2.GenerateResponse(text=text)) if text else b""

    def _prompt_text(self, index: int) -> str:
        """The text of the prompt, where it begins that of the choice."""
        return self._prompt_texts[index] if self._includes.prompt_text else ""

    def _delta(self, index: int, message: inference_pb2.GenerateResponse) -> str | None:
        return f'"text": {quote(message.text)}'

    def _extensions(self, index: int, message: inference_pb2.GenerateResponse) -> dict[str, Any]:
        extensions = super()._extensions(index, message)
        if self._includes.token_ids and index not in self._begun:
            self._begun.add(index)
            extensions["prompt_token_ids"] = list(self._prompts[index])
        return extensions

    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        logprobs = None
        before = self._prompt_text(index)
        if choice.tokens or (choice.prompt_token_ids and self._includes.prompt_text):
            offsets = self._new_offsets().extend(choice.token_ids, choice.text)
            end = len(choice.text)
            logprobs = _completion_logprobs(
                self._echoed(choice.prompt_token_ids, choice.prompt_logprobs) + choice.tokens,
                self._echoed_offsets(index, choice.prompt_token_ids)
                + [len(before) + min(end, at) for at in offsets],
            )
        found = {
            "index": index,
            "text": before + choice.text,
            "logprobs": logprobs,
            "finish_reason": FINISH_REASONS.get(choice.reason),
        }
        found |= self._prompt_logprobs((choice,))
        if self._includes.token_ids:
            found["prompt_token_ids"] = list(self._prompts[index])
        return found

    def _logprobs(
        self, index: int, tokens: list[dict[str, Any]], message: inference_pb2.GenerateResponse
    ) -> dict[str, Any]:
        if message.prompt_token_ids:
            echoed = self._echoed(message.prompt_token_ids, message.prompt_logprobs)
            return _completion_logprobs(
                echoed, self._echoed_offsets(index, message.prompt_token_ids)
            )
        if index not in self._offsets:
            self._offsets[index] = self._new_offsets()
        offsets = self._offsets[index].extend(message.token_ids, message.text)
        before = len(self._prompt_text(index))
        return _completion_logprobs(tokens, [before + at for at in offsets])

    def _echoed(
        self, token_ids: Sequence[int], entries: Sequence[sampling_pb2.TokenLogprobs]
    ) -> list[dict[str, Any]]:
        """The next tokens of a prompt, where the logprobs have them."""
        if not self._includes.prompt_text:
            return []
        return self._names.prompt_tokens_of(token_ids, entries, self._alternatives)

    def _echoed_offsets(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """As `_echoed`: where they begin."""
        if not self._includes.prompt_text:
            return []
        if index not in self._prompt_offsets:
            self._prompt_offsets[index] = PromptOffsets(self._codec, self._prompt_text(index))
        return self._prompt_offsets[index].extend(token_ids)

    def _new_offsets(self) -> TextOffsets:
        return TextOffsets(self._codec, skip_special_tokens=self._skip_special_tokens)


def _completion_logprobs(tokens: list[dict[str, Any]], offsets: list[int]) -> dict[str, Any]:
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {
                **{other["token"]: other["logprob"] for other in token["top_logprobs"]},
                # Parts of characters have equal names.
                token["token"]: token["logprob"],
            }
            if token["top_logprobs"] is not None
            else None
            for token in tokens
        ],
        "text_offset": offsets,
    }

"""The content of a completion: converts its tokens to text, finds stop strings, and fills messages."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_common.errors import ProtocolViolation
from headrace_frontend.request.validation import PreparedRequest
from headrace_text.detokenizer import IncrementalDetokenizer, StopStringScanner

# Of prompt tokens, in one message. A reader formats so many in some milliseconds.
_MESSAGE_VALUES_MAX = 2_048


class CompletionText:
    """Converts the tokens of one completion in their order. A stop token ends a completion and has no text."""

    def __init__(self, request: PreparedRequest) -> None:
        self._min_tokens = request.sampling.min_tokens
        self._detokenizer = IncrementalDetokenizer(
            request.codec, request.token_ids, skip_special_tokens=request.skips_special_tokens
        )
        self._stop_scanner = StopStringScanner(request.stop_strings, keeps_stop=request.keeps_stop)
        self._stop_token_ids = frozenset(() if request.keeps_stop else request.stop_token_ids)
        self.has_stop_strings = bool(request.stop_strings)
        """Whether tokens must be converted one by one, to find the token that completes a stop string."""

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self.has_stop_strings and self._stop_scanner.stopped

    @property
    def stopped_by(self) -> str:
        """The stop string that is complete. Empty while none is."""
        return self._stop_scanner.stopped_by

    def replay(self, token_ids: list[int]) -> None:
        """Advances over tokens that the client already has."""
        if not self.has_stop_strings:
            self.extend(token_ids)
            return
        for number, token_id in enumerate(token_ids, start=1):
            self.append(token_id, number)

    def append(self, token_id: int, number: int) -> str:
        """The text that the completion's token number `number`, from 1, adds. Stop strings are found."""
        if token_id in self._stop_token_ids:
            return ""
        may_stop = number > self._min_tokens
        return self._stop_scanner.scan(self._detokenizer.append(token_id), may_stop=may_stop)

    def extend(self, token_ids: list[int]) -> str:
        """The text that tokens add, converted in one call. Stop strings are not found."""
        if not self._stop_token_ids.isdisjoint(token_ids):
            token_ids = [one for one in token_ids if one not in self._stop_token_ids]
        return self._detokenizer.extend(token_ids)

    def finish(self, completion_tokens: int) -> str:
        """The text that was held back: it can be a part of a character or of a stop string, which it can complete."""
        rest = "" if self.stopped else self._detokenizer.flush()
        if not self.has_stop_strings:
            return rest
        may_stop = completion_tokens > self._min_tokens
        return self._stop_scanner.scan(rest, may_stop=may_stop) + self._stop_scanner.flush()


def wants_prompt_logprobs(request: PreparedRequest) -> bool:
    """Whether the response has the logprobs of the prompt. One that continues has sent them."""
    return request.sampling.HasField("prompt_logprobs") and not request.generated


class PromptLogprobs:
    """The prompt's tokens and their logprobs until they are sent, in parts of a bounded size."""

    def __init__(self, request: PreparedRequest) -> None:
        self._token_ids = request.token_ids
        self.awaited = True
        """Whether the worker has not sent them."""
        self._step = max(1, _MESSAGE_VALUES_MAX // (request.sampling.prompt_logprobs + 1))
        self._entries: Sequence[sampling_pb2.TokenLogprobs] = ()
        self._next = len(self._token_ids)

    @property
    def pending(self) -> bool:
        """Whether a part is not sent."""
        return self._next < len(self._token_ids)

    def put(self, entries: Sequence[sampling_pb2.TokenLogprobs]) -> None:
        """Those of the whole prompt, before the first token. Raises ProtocolViolation when some are missing."""
        if len(entries) != len(self._token_ids) - 1:
            raise ProtocolViolation(
                f"the decode worker sent logprobs of {len(entries)} prompt tokens, not of "
                f"{len(self._token_ids) - 1}; its version may lack prompt_logprobs"
            )
        self._entries, self._next = entries, 0
        self.awaited = False

    def fill(self, message: inference_pb2.GenerateResponse) -> None:
        """Moves the next part to a message."""
        start, self._next = self._next, min(self._next + self._step, len(self._token_ids))
        message.prompt_token_ids.extend(self._token_ids[start : self._next])
        message.prompt_logprobs.extend(self._entries[max(0, start - 1) : self._next - 1])
        if not self.pending:
            self._entries = ()

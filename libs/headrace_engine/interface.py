"""What the prefill and decode services ask of an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from headrace_common.errors import InternalError
from headrace_engine.prefix.event_publisher import PrefixEventPublisher
from headrace_kv.handoff.messages import LayerSent, Reservation, TransferTarget
from headrace_kv.layout.layout import KvDescriptor
from headrace_kv.receive.local_broadcast import LocalBroadcast
from headrace_kv.receive.transfer import IncomingTransfer
from headrace_kv.transport.memory import Memory


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens, every default filled in. Units and ranges as in sampling.proto."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int = 1
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Compute `token_ids` and hand [target.start_token, target.end_token) over, whose end is theirs.

    With `sampling` they are the whole prompt, and the first token of its answer is chosen too, whatever max_tokens and
    the stop tokens say. With target.with_logits they are the whole prompt as well, and its last token's logits are
    handed over. Else they are the prompt without its last token, which decode computes.
    """

    token_ids: tuple[int, ...]
    target: TransferTarget
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """What a prefill did. `layers` holds what every rank sent; times are nanoseconds since the Unix epoch.

    `control_bytes` are as in SendReport, of all ranks.
    """

    cached_tokens: int
    compute_start_unix_ns: int
    compute_end_unix_ns: int
    layers: tuple[tuple[int, LayerSent], ...]
    control_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Generate from `token_ids`. With `remote_kv` all but the last token's KV comes over the data plane.

    The last `generated_tokens` of `token_ids`, at least one less than there are, belong to the answer: they count for
    penalties, max_tokens, which is above them, and the place in a seed's random stream, and are not yielded.
    With `awaits_first_token`, which needs `remote_kv` and nothing generated, the KV of all tokens comes, and generation
    goes on after the token that `Engine.first_token` names; or, with `from_logits` too, after the one that the engine
    chooses from what `Engine.first_logits` gives it, and yields.
    """

    transfer_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    remote_kv: bool
    generated_tokens: int = 0
    awaits_first_token: bool = False
    from_logits: bool = False

    @property
    def prompt_tokens(self) -> int:
        """How many of the tokens are the prompt's."""
        return len(self.token_ids) - self.generated_tokens

    @property
    def transferable_tokens(self) -> int:
        """How many of the tokens, the first ones, a prefill worker may hand over."""
        return len(self.token_ids) - (0 if self.awaits_first_token else 1)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token and its likeliest alternatives as (token id, log probability)."""

    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    """New tokens, with one entry of logprobs each if they were asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """The end of generation. `stopped` is True for a stop token, False for max_tokens or the end of the context."""

    stopped: bool
    cached_tokens: int


DecodeEvent = Reservation | DecodeTokens | DecodeEnded


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """What an engine holds: requests, and KV blocks that hold their KV."""

    running_requests: int
    waiting_requests: int
    used_blocks: int = 0


class Engine(ABC):
    """One model on one worker: all its ranks. Its methods are called on one event loop, except `start`.

    A prefill engine is only asked for `prefill`, a decode engine for the rest.
    """

    descriptor: KvDescriptor
    max_model_len: int
    broadcast: LocalBroadcast | None = None
    """What copies between the ranks, after `start`, of a layout with a broadcast_width. `close` ends it."""
    landed_memory: Memory | None = None
    """How this process reads the KV memory of `descriptor`; None where it cannot."""
    logits_bytes: int = 0
    """Of one position's logits, which a prefill engine hands over and a decode engine chooses a token from, after
    `start`; 0 of an engine that cannot."""
    prefix_events: PrefixEventPublisher | None = None
    """What says, after `start`, which prefixes the cache holds; None of an engine that cannot tell."""

    @abstractmethod
    async def start(self) -> None:
        """Loads the model and registers the KV memory; afterwards `descriptor` and `max_model_len` are set.

        Raises ConfigError with one line that says what to do.
        """

    @abstractmethod
    async def prefill(
        self, work: PrefillWork, on_first_token: Callable[[DecodeTokens], None] | None = None
    ) -> PrefillOutcome:
        """Computes and sends. Returns when every rank's sender is quiet (I2), and so does its cancellation.

        With `work.sampling`, `on_first_token` gets the one token as soon as it is computed, however much is still to
        be sent.
        Raises TransferFailed, TransferTimeout, StaleIncarnation, LayoutMismatch or InternalError.
        """

    @abstractmethod
    def decode(self, work: DecodeWork) -> AsyncIterator[DecodeEvent]:
        """Yields, with `remote_kv`, the Reservation once blocks are held; then tokens; then DecodeEnded.

        When the reservation is not empty, no token is yielded before its cache is whole, but for one that is chosen
        from `first_logits`; the end can follow that one at once. The engine waits for `arrived`, unless its
        `arrival_listener` has heard that before. Closing the iterator aborts the request, but the reservation's blocks
        stay held until `arrived` or `released` was called (I1). An empty reservation (start_token == end_token) needs
        neither; one that awaits its first token is never empty.
        """

    @abstractmethod
    def arrived(self, transfer_id: str) -> None:
        """The KV cache is whole: the request may run."""

    def arrival_listener(self) -> Callable[[IncomingTransfer], None] | None:
        """What is told whenever something of one transfer lands, of an engine that may begin before the last layers are
        there. `arrived` and `released` are called all the same.
        """
        return None

    @abstractmethod
    def first_token(self, transfer_id: str, token_id: int) -> None:
        """The first token of a request that awaits it, before or after `arrived`; it does not end the answer."""

    def first_logits(self, transfer_id: str, logits: bytes) -> None:
        """What a request with `from_logits` chooses its first token from, of `logits_bytes`, before or after `arrived`.

        `decode` raises TransferFailed or KvCorrupt where they cannot be those of its model.
        """
        raise InternalError("this engine chooses no token from logits")

    @abstractmethod
    def released(self, transfer_id: str) -> None:
        """Nothing writes into the reservation any more, and it is not whole: its blocks may be reused."""

    @abstractmethod
    def usage(self) -> EngineUsage:
        """What the engine is doing now."""

    async def reset_prefix_cache(self) -> bool:
        """Forgets every cached prefix; False when that cannot be, since requests hold blocks just now."""
        return True

    @abstractmethod
    async def close(self) -> None:
        """Ends everything; returns when all processes and threads of the engine are gone."""

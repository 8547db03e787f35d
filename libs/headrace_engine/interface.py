"""The interface between the prefill and decode services and an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from headrace_common.callers.priority import Priority
from headrace_common.errors import InvalidRequest
from headrace_common.registry.adapters import Adapter
from headrace_common.time_model.model import NO_STEPS, StepTimes
from headrace_engine.prefix_events import PrefixEventPublisher
from headrace_engine.receipts import RequestCost
from headrace_engine.step_budget import NO_BOUNDS, TokenBounds
from headrace_engine.steps import StepWatch
from headrace_kv.hidden_state import HiddenFormat
from headrace_kv.layout import KvDescriptor
from headrace_kv.messages import Reservation, SendReport, TransferTarget
from headrace_kv.prefix.events import Tier
from headrace_kv.receive.local_broadcast import LocalBroadcast
from headrace_kv.tiers.load_times import LoadTimes, TierLoad
from headrace_kv.tiers.promises import NO_PROMISES, KeepTerms, Kept, PromiseCounts
from headrace_kv.transport.guard import Networks
from headrace_kv.transport.memory import Memory, WordSums

ConstraintKind: TypeAlias = Literal[
    "json", "json_object", "regex", "choice", "grammar", "structural_tag"
]


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form of an answer, as in sampling.proto. `text` is empty for json_object and for choice."""

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens, with defaults filled in. Units and ranges are those of sampling.proto."""

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
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the value that is added to its score."""
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """Empty for all."""
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    """Alternatives beside each prompt token. None: the prompt's tokens are not reported."""


class RemotePrefix(Protocol):
    """Another worker that has the KV of a prompt's tokens below `end_token`."""

    @property
    def transfer_id(self) -> str:
        """The transfer that brings this KV."""
        ...

    @property
    def end_token(self) -> int:
        """One past the last token with KV there."""
        ...

    @property
    def least_tokens(self) -> int:
        """The fewest tokens that `start` may agree to."""
        ...

    def start(self, reservation: Reservation) -> bool:
        """Whether the KV is fetched into the reserved blocks, which hold the tokens that this engine lacks.

        If so, `Arrived` or `Recompute` follows. The blocks stay held until `Arrived` or `Released` (I1). Called at most
        once. It neither waits nor raises. Where the engine `computes_beside`, `LayersArrived` may come before. Then the
        prefill is cancelled in place of `Recompute`.
        """
        ...


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt, as in image.proto. It is an ImageSpan of the prompt's token ids."""

    data: bytes = field(repr=False)
    content_hash: bytes
    start_token: int
    token_count: int


@dataclass(frozen=True, slots=True)
class PrefillWork:
    """Compute `token_ids` and send the KV of [target.start_token, target.end_token), up to their end.

    With `sampling` they are the whole prompt, and the first token of its answer is chosen too; max_tokens is ignored.
    With target.with_hidden_state they are the whole prompt as well, and the last token's hidden state is sent.
    Otherwise they are the prompt without its last token, which decode computes.
    """

    token_ids: tuple[int, ...]
    target: TransferTarget
    sampling: Sampling | None = None
    cache_salt: str = ""
    """Only requests with an equal salt share cached blocks."""
    adapter: Adapter | None = None
    """One of the engine's adapters, None for the model alone. Needs a salt of its own."""
    priority: Priority = Priority.NORMAL
    """Cached blocks that only lower classes have used are reused first, where the engine manages them."""
    bounds: TokenBounds = NO_BOUNDS
    """When its tokens are due."""
    images: tuple[PromptImage, ...] = ()
    """In their order. `token_ids` have the placeholders of each one."""
    prefix: RemotePrefix | None = None
    """Where the engine may have KV fetched from that it would compute otherwise."""
    cached_only: bool = False
    """Only cached KV is sent, with neither sampling nor a hidden state. `prefill` raises NotFound if some of it is not
    cached. Engines that only receive KV otherwise can do this too.
    """


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """The result of a prefill, with the report of each rank. `fetched_tokens` have KV from the work's `prefix`."""

    cached_tokens: int
    compute_start_unix_ns: int
    compute_end_unix_ns: int
    reports: tuple[SendReport, ...] = ()
    fetched_tokens: int = 0
    tier_tokens: Mapping[Tier, int] = field(default_factory=dict)
    """The cached tokens that came from tiers below KV memory, by tier; empty where the engine does not report it."""
    cost: RequestCost = field(default_factory=RequestCost, compare=False)


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Generate from `token_ids`. With `remote_kv`, the KV of all but the last token arrives by transfer.

    The last `generated_tokens` of `token_ids` belong to the answer; at least one token is the prompt's. They count for
    penalties, for max_tokens, which is above them, and for the position in a seed's random stream, but are not yielded.

    `awaits_first_token` needs `remote_kv` and no generated tokens. The KV of all tokens arrives then, and generation
    continues after the token that `FirstToken` gives. With `from_hidden_state` too, it continues after the one
    that the engine chooses from the state of `FirstHiddenState`, and yields. `sampling.prompt_logprobs`
    exclude `remote_kv` and generated tokens, and the engine computes the whole prompt then: it reads no cached prefix.
    """

    transfer_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    remote_kv: bool
    generated_tokens: int = 0
    awaits_first_token: bool = False
    from_hidden_state: bool = False
    cache_salt: str = ""
    """As in PrefillWork."""
    tenant_salt: str = ""
    """Equal for all requests of a tenant, which has one constraint compiled at a time."""
    adapter: Adapter | None = None
    """As in PrefillWork."""
    priority: Priority = Priority.NORMAL
    """As in PrefillWork."""
    bounds: TokenBounds = NO_BOUNDS
    """As in PrefillWork."""
    keep: KeepTerms | None = None
    """Asks for a promise to keep the KV of `token_ids` and the answer. Its name is the transfer id."""
    images: tuple[PromptImage, ...] = ()
    """As in PrefillWork. None of them has the prompt's last token. With `remote_kv` they are not encoded here."""
    computes_from: int = 0
    """Where the engine `computes_beside`, with `remote_kv`: it computes the tokens from this one on, the first of a
    block, and only the KV of those before it arrives. 0: it computes the last token only.
    """

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids) - self.generated_tokens

    @property
    def transferable_tokens(self) -> int:
        """The first tokens, with KV that a prefill worker may send."""
        return self.computes_from or len(self.token_ids) - (0 if self.awaits_first_token else 1)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a token, and its most likely alternatives as (token id, log probability).

    `rank`: see sampling.proto.
    """

    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    """New tokens, with one entry of logprobs each if they were requested.

    `step_start_ns` is when the first step with the request began, by the host's monotonic clock; 0 when the engine does
    not report it. Tokens of later steps may repeat it. The first tokens come with the `prompt_logprobs`, one entry for
    each prompt token after the first, if they were requested.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = field(default=())
    step_start_ns: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """The end of generation. `stopped` is True for a stop token, False for max_tokens or the end of the context."""

    stopped: bool
    cached_tokens: int
    tier_tokens: Mapping[Tier, int] = field(default_factory=dict)
    """As in PrefillOutcome."""
    kept: Kept | None = None
    """What is promised for the work's `keep`, also without tokens. None where the engine can promise nothing."""
    cost: RequestCost = field(default_factory=RequestCost, compare=False)


DecodeEvent = Reservation | DecodeTokens | DecodeEnded | RequestCost
"""Of a request that fails or is aborted, `RequestCost` may come last, also once `Engine.decode` has ended."""


class AnswerSink(Protocol):
    """Takes what an engine generates for one request. Its methods are called on the event loop, and never raise."""

    def put(self, event: DecodeEvent) -> None:
        """The next event. The first tokens that are computed from KV are one."""
        ...

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """The tokens of a later step, without logprobs: no object and no task for each of them.

        It may be another function after each call, so that what happens once costs later tokens nothing.
        """
        ...


@dataclass(frozen=True, slots=True)
class Arrived:
    """The KV cache is complete: the request may run."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Released:
    """The transfer has failed and nothing writes into the reservation: its blocks may be reused."""

    transfer_id: str


@dataclass(frozen=True, slots=True)
class Recompute:
    """The KV of a work's `prefix` does not arrive: the engine computes it, into other blocks.

    The reserved blocks may still be written into, until `Released`. Ignored after `Arrived` and `Released`.
    """

    transfer_id: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of a request that awaits it, before or after `Arrived`. It does not end the answer."""

    transfer_id: str
    token_id: int


@dataclass(frozen=True, slots=True)
class FirstHiddenState:
    """The state for the first token of a request with `from_hidden_state`, before or after `Arrived`.

    `decode` raises TransferFailed or KvCorrupt when it cannot be from its model.
    """

    transfer_id: str
    state: bytes


@dataclass(frozen=True, slots=True)
class LayersArrived:
    """The KV of the first `layer_count` layers is complete, for a work with `computes_from`, or a prefix: it may run.

    Its steps wait in each layer for that layer. After a failure they must not wait: all layers count as arrived.
    """

    transfer_id: str
    layer_count: int


TransferEvent: TypeAlias = (
    Arrived | Released | Recompute | FirstToken | FirstHiddenState | LayersArrived
)
"""What becomes of one transfer into this engine, and what comes beside it."""


@dataclass(frozen=True, slots=True)
class ReceivedBlock:
    """A block of the layout's first group that a transfer has filled. `token_ids` end with its last token.

    Without `block_id`, it is any block that is cached with these tokens.
    """

    block_id: int | None
    token_ids: tuple[int, ...]
    cache_salt: str = ""
    """As in PrefillWork."""
    adapter: Adapter | None = None
    """As in PrefillWork."""
    images: tuple[PromptImage, ...] = ()
    """As in PrefillWork."""


BlockErrors: TypeAlias = Mapping[tuple[int, int], float]
"""By layer and head: the difference of two blocks, relative to their values.

0 for equal blocks, about 1.4 for unrelated ones.
"""


@dataclass(frozen=True, slots=True)
class EngineUsage:
    """The requests of an engine, and the KV blocks that they hold."""

    running_requests: int
    waiting_requests: int
    used_blocks: int = 0


class Engine(ABC):
    """One model on one worker: all its ranks. Its methods are called on one event loop, except `start`.

    Only `prefill` is called on a prefill engine, and only the other methods on a decode engine. Where a work has a
    RemotePrefix, `transfer_event` is called on the prefill engine, and `prefill` with `cached_only` on the decode
    engine.
    """

    descriptor: KvDescriptor
    max_model_len: int
    vocabulary_size: int
    """Ids of tokens are below it, but for placeholders of images. Equal layouts mean an equal one; set by `start`."""
    broadcast: LocalBroadcast | None = None
    """Copies between the ranks of a layout with a broadcast_width; set by `start`, ended by `close`."""
    hidden_format: HiddenFormat | None = None
    """The form of its hidden states, set by `start`; None for an engine that cannot send them or sample from them."""
    prefix_events: PrefixEventPublisher
    """Publishes the cached prefixes; set by `start`."""
    tier_loads: LoadTimes
    """Loads from the tiers below KV memory. Empty without such tiers."""
    adapters: tuple[Adapter, ...] = ()
    """The LoRA adapters that requests may name; set by `start`. Several may have one name."""
    steps: StepWatch
    """Whether it steps."""
    landed_memories: Mapping[int, Memory] = MappingProxyType({})
    """This process's access to the KV memory of ranks of `descriptor`, to read it. Set by `start`; `close` ends it."""
    landed_sums: Mapping[int, WordSums] = MappingProxyType({})
    """Sums of the KV memory of each rank, set by `start`. Not for the thread of the event loop."""
    compares_blocks: bool = False
    """Whether it can compute a received block again; set by `start`."""
    computes_beside: bool = False
    """Whether it can compute a prompt's last tokens while KV of the others arrives; set by `start`."""

    @abstractmethod
    async def start(self) -> None:
        """Loads the model and registers the KV memory; afterwards `descriptor` and `max_model_len` are set.

        Raises ConfigError with the remedy in one line.
        """

    @abstractmethod
    async def prefill(
        self,
        work: PrefillWork,
        on_first_token: Callable[[DecodeTokens], None] | None = None,
        on_report: Callable[[SendReport], None] | None = None,
    ) -> PrefillOutcome:
        """Computes and sends. Returns when every rank's sender is quiet (I2), also when cancelled.

        With `work.sampling`, `on_first_token` gets the one token as soon as it is computed, before the rest is sent.
        `on_report` gets the report of every rank before this returns or raises.

        Raises TransferFailed, TransferTimeout, StaleIncarnation, LayoutMismatch, NotFound or InternalError.
        """

    @abstractmethod
    async def decode(self, work: DecodeWork, sink: AnswerSink) -> None:
        """Gives `sink` the Reservation of a request with `remote_kv` once blocks are held, tokens, and DecodeEnded.

        Returns after the end. With a reservation that is not empty, no token comes before the KV cache is complete. The
        exception is a token that is chosen from `FirstHiddenState`; the end can follow it directly. The engine waits
        for `Arrived`.

        Its cancellation aborts the request. The reservation's blocks stay held until `Arrived` or `Released` (I1). An
        empty reservation (start_token == end_token) needs neither. A request that awaits its first token never has one.
        """

    @abstractmethod
    def transfer_event(self, event: TransferEvent) -> None:
        """Ignored for a transfer that the engine does not have, or for which the event comes too late."""

    async def compare_block(self, block: ReceivedBlock) -> BlockErrors | None:
        """Computes a received block again, after the blocks before it, and returns how the received one differs.

        Call it where `compares_blocks`, when the block's request has ended. None when the block or one before is not
        cached any more. Raises HeadraceError.
        """
        return None

    async def admit_transfer_peers(self, networks: Networks) -> None:  # noqa: B027
        """From now on only hosts in `networks` may connect to the transports of this engine's KV memory.

        Returns when that is so for every rank. Raises as KvTransport.admit does, or InternalError.
        """

    def tier_loaded(self, load: TierLoad, rank: int = 0) -> None:
        """A rank has loaded blocks from a lower tier, or could not load them. Routers learn what that takes."""
        self.tier_loads.record(load, rank)
        seconds_per_block = self.tier_loads.seconds_per_block(load.tier)
        if seconds_per_block is not None:
            self.prefix_events.load_measured(load.tier, seconds_per_block)

    @abstractmethod
    def usage(self) -> EngineUsage:
        """The engine's current requests and blocks."""

    @property
    def step_times(self) -> StepTimes:
        """What it has learned of the time of its steps."""
        return NO_STEPS

    @property
    def promises(self) -> PromiseCounts:
        """Its promises to keep KV."""
        return NO_PROMISES

    async def keep(self, terms: KeepTerms) -> Kept | None:
        """Lets the promise of request `terms.name` hold for `terms.seconds` from now on; 0 ends it.

        None when `terms.owner` has no such promise.
        """
        return None

    async def reset_prefix_cache(self) -> bool:
        """Evicts every cached prefix; False when requests hold blocks, so that it cannot."""
        return True

    async def load_adapter(self, name: str, folder: Path, *, is_3d_lora_weight: bool) -> Adapter:
        """Loads an adapter from a folder of this host. It is among `adapters` when this returns.

        An adapter of this name stays, if it has another digest. Raises InvalidRequest for the fields of RuntimeAdapter.
        """
        raise InvalidRequest({"path": "this engine loads no adapters at run time"})

    def require_adapter(self, adapter: Adapter | None) -> None:
        """Raises InvalidRequest for an adapter that is not among `adapters`."""
        if adapter is not None and adapter not in self.adapters:
            raise InvalidRequest({"adapter": f"the engine has no adapter {adapter.name!r}"})

    def unload_adapter(self, adapter: Adapter) -> None:  # noqa: B027 - most load none
        """No new request names the adapter. It stays among `adapters` until another one needs its room."""

    @abstractmethod
    async def close(self) -> None:
        """Aborts all requests, and returns when all processes and threads of the engine have ended."""

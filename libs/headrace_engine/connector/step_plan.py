"""The plan of one step, which the scheduler sends to every rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_kv.messages import TransferTarget
from headrace_kv.tiers.tiers import TierCopy


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens [start_token, end_token) of one transfer, of every layer.

    `block_ids` are by group of the layout. Those of tokens are in token order from token 0. A state has one block, the
    page that the step makes final, or none when the step does not make it final.
    """

    transfer_id: str
    start_token: int
    end_token: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RequestCopy:
    """A copy between tiers, planned for a request of vLLM."""

    request_id: str
    copy: TierCopy


@dataclass(frozen=True, slots=True)
class HostSend:
    """Tokens of a transfer that every rank sends from its main memory. The ids of `tokens` are blocks there.

    The first `copies_before` copies of the plan are made before. Each rank reports the `number` once when nothing reads
    the blocks any more.
    """

    number: int
    tokens: TokenRange
    copies_before: int


@dataclass(frozen=True, slots=True)
class PoolMove:
    """Blocks of the fastest lower tier that every rank fetches from a remote pool (`fetches`), or stores there.

    What a rank has not moved in `timeout_s` counts as missing.
    """

    number: int
    fetches: bool
    prefixes: tuple[int, ...]
    block_ids: tuple[int, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class BlockComparison:
    """A received block of the layout's first group, and the block with the same tokens that the step computes."""

    comparison_id: str
    received_block: int
    computed_block: int


@dataclass(slots=True)
class StepPlan:
    """Request ids are vLLM's, transfer ids ours.

    `opened`: transfers that begin. `ready`: tokens that an earlier step has computed.
    `computed`: tokens that this step's forward pass completes, layer by layer.
    `final`: transfer by request, where it wants the hidden state of its last token, which this step computes.
    `preempted`: transfers with blocks that the step overwrites.
    `overrun`: transfers with states that the step advances beyond their last token.
    `finished_sends`: transfer by request that has ended. Its blocks are freed once the transfer is quiet.
    `received`: requests that may run after the step, because their incoming transfer is whole.
    `fences`: whether the step may read what peers have written since the step before.
    `failed`: requests of failed incoming transfers.
    `copies`: copies between tiers, which begin in this order beside the forward pass.
    `loads`: requests that may run when their copies have ended; True if they also wait for a transfer.
    `finished_stores`: requests that have ended. Their blocks are freed once their copies have ended; True if also once
    a transfer is quiet.
    `preempted_stores`: requests with blocks that the step overwrites, and that copies may still read.
    `moves`: blocks that go to a remote pool or come from it, once the copies before are made.
    `host_sends`: blocks in main memory that transfers send, which `opened` has or had. In the order of `copies_before`.
    `refused`: transfers of cached KV, of which some is not cached.
    `comparisons`: blocks that the step computes again.
    `begun`: those of `received` of which only the first layers have arrived. The others arrive while they run.
    `awaited`: the transfers with such layers. In each layer, the step waits for theirs.
    `completed`: requests that were `begun`, with all layers now.
    """

    opened: list[TransferTarget] = field(default_factory=list)
    ready: list[TokenRange] = field(default_factory=list)
    computed: list[TokenRange] = field(default_factory=list)
    final: dict[str, str] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    overrun: list[str] = field(default_factory=list)
    finished_sends: dict[str, str] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    copies: list[RequestCopy] = field(default_factory=list)
    loads: dict[str, bool] = field(default_factory=dict)
    finished_stores: dict[str, bool] = field(default_factory=dict)
    preempted_stores: list[str] = field(default_factory=list)
    moves: list[PoolMove] = field(default_factory=list)
    host_sends: list[HostSend] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    comparisons: list[BlockComparison] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    awaited: list[str] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    fences: bool = False

    def run_received(self, request_ids: list[str]) -> None:
        """These requests may run in the step itself."""
        self.received = [one for one in self.received if one not in request_ids]
        self.fences = bool(request_ids)

    def send_hidden_state(self, request_id: str, transfer_id: str) -> None:
        """Sends the hidden state of a request's last token, which this step computes."""
        self.final[request_id] = transfer_id

    def free_after_send(self, request_id: str, transfer_id: str) -> None:
        """Frees the blocks of a request that has ended once its transfer is quiet."""
        self.finished_sends[request_id] = transfer_id

    def plan_copies(
        self, copies: list[RequestCopy], loads: dict[str, bool], finished_stores: dict[str, bool]
    ) -> None:
        """Adds copies between tiers, and the requests that wait for some."""
        self.copies, self.loads, self.finished_stores = copies, loads, finished_stores

    def plan_moves(self, moves: list[PoolMove]) -> None:
        """Adds moves of blocks between the fastest lower tier and a remote pool."""
        self.moves = moves

    def plan_host_sends(self, sends: list[HostSend]) -> None:
        """Adds blocks in main memory that transfers send from there."""
        self.host_sends = sends

    def compare(self, comparisons: list[BlockComparison]) -> None:
        """Compares blocks after the forward pass."""
        self.comparisons = comparisons

    def send_computed(self, target: TransferTarget, tokens: TokenRange) -> None:
        """Opens a transfer of tokens that an earlier step has computed."""
        self.opened.append(target)
        self.ready.append(tokens)

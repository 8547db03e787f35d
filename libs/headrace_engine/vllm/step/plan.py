"""The plan of one step, which the scheduler sends to every rank. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_kv.handoff.messages import TransferTarget


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
class OverlappedLoad:
    """A transfer with a request that may run in the step although its last layers may be missing.

    `block_ids` are those of the layout's only group. `lost`: no further layer will arrive.
    """

    transfer_id: str
    block_ids: tuple[int, ...]
    deadline_s: float
    lost: bool = False


@dataclass(slots=True)
class StepPlan:
    """Request ids are vLLM's, transfer ids ours.

    `opened`: transfers that begin. `ready`: tokens that an earlier step has computed.
    `computed`: tokens that this step's forward pass completes, layer by layer.
    `final`: transfers that want the logits of their last token, which this step computes.
    `preempted`: transfers with blocks that the step overwrites.
    `overrun`: transfers with states that the step advances beyond their last token.
    `finished_sends`: transfer by request that has ended. Its blocks are freed once the transfer is quiet.
    `received`: requests that may run, because their incoming transfer is whole or overlapped.
    `failed`: requests of failed incoming transfers.
    `overlapped`: transfers that the step's forward pass may have to wait for.
    """

    opened: list[TransferTarget] = field(default_factory=list)
    ready: list[TokenRange] = field(default_factory=list)
    computed: list[TokenRange] = field(default_factory=list)
    final: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    overrun: list[str] = field(default_factory=list)
    finished_sends: dict[str, str] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    overlapped: list[OverlappedLoad] = field(default_factory=list)

    def free_after_send(self, request_id: str, transfer_id: str) -> None:
        """Frees the blocks of a request that has ended once its transfer is quiet."""
        self.finished_sends[request_id] = transfer_id

    def send_computed(self, target: TransferTarget, tokens: TokenRange) -> None:
        """Opens a transfer of tokens that an earlier step has computed."""
        self.opened.append(target)
        self.ready.append(tokens)

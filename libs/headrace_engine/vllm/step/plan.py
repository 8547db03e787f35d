"""What the scheduler tells every rank before a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace_kv.handoff.messages import TransferTarget


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens [start_token, end_token) of one transfer, of every layer.

    `block_ids` are by group of the layout: in token order from token 0, or the page of a state that the step makes
    final. A state that the step does not make final has none.
    """

    transfer_id: str
    start_token: int
    end_token: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LateLoad:
    """A transfer whose request may run in the step although its last layers may be missing.

    `block_ids` are those of the layout's only group; `lost` when no further layer will come.
    """

    transfer_id: str
    block_ids: tuple[int, ...]
    deadline_unix_s: float
    lost: bool = False


@dataclass(slots=True)
class StepPlan:
    """One step's news. Request ids are vLLM's, transfer ids ours.

    `opened`: transfers that begin. `ready`: tokens that an earlier step has completed. `computed`: tokens that are
    complete, layer by layer, with this step's forward pass. `preempted`: transfers whose blocks are about to be
    overwritten.
    `final`: transfers whose last token this step computes, so that its logits are theirs.
    `overrun`: transfers whose states the step takes beyond their last token.
    `finished_sends`: requests that are done computing, with their transfer; their blocks are freed once it is quiet.
    `received` and `failed`: requests whose incoming transfer is whole, or nearly, or will never be.
    `late`: transfers that the step's forward pass may have to wait for.
    """

    opened: list[TransferTarget] = field(default_factory=list)
    ready: list[TokenSpan] = field(default_factory=list)
    computed: list[TokenSpan] = field(default_factory=list)
    final: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    overrun: list[str] = field(default_factory=list)
    finished_sends: dict[str, str] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    late: list[LateLoad] = field(default_factory=list)

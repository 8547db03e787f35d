"""Groups of layers that share a block list for each request. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from headrace_common.errors import ConfigError
from headrace_engine.vllm.state_parts import StatePart
from headrace_kv.layout.layout import STATE, TOKENS, GroupKind
from headrace_kv.receive.observer import OverlapSettings


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The vLLM KV cache group with this `index`. `layers` are (number in the layout, name).

    Entry i of a request's block list holds the tokens from i * block_tokens on. For a state, it holds the state after
    the last computed one of these tokens. Groups may share memory, but a block belongs to one group at a time.
    `block_format` names how a block is packed. It is empty where the attention kernels decide that. `page_bytes`: one
    block of one layer on a rank. `window_tokens` and `chunk_tokens` are those of CacheGroup. vLLM frees the blocks of
    such a group that no later token attends to, and has its null block in their place. A state with `state_parts` has
    heads; without them, its page is one piece for each rank. With pipeline stages, `layers` are those of one stage,
    numbered from 0, and no stage has more layers of all groups than `stage_layers_max`.
    """

    index: int
    name: str
    kind: GroupKind
    head_count: int
    block_tokens: int
    block_format: str
    layers: tuple[tuple[int, str], ...]
    page_bytes: int = 0
    window_tokens: int = 0
    chunk_tokens: int = 0
    state_parts: tuple[StatePart, ...] = ()
    stage_layers_max: int = 0

    @property
    def is_windowed(self) -> bool:
        """Whether vLLM frees blocks of a request that still computes."""
        return self.window_tokens > 0 or self.chunk_tokens > 0

    @property
    def keeps_all_tokens(self) -> bool:
        """Whether a request holds the blocks of all its tokens until it ends."""
        return self.kind == TOKENS and not self.is_windowed

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers of the rank with the most layers: the same in every process."""
        return self.page_bytes * (self.stage_layers_max or len(self.layers))

    def blocks_between(
        self, block_ids: Sequence[int], start_token: int, end_token: int
    ) -> tuple[int, ...]:
        """The blocks in a request's list that hold tokens [start_token, end_token), or the state after them."""
        last = -(-end_token // self.block_tokens)
        return tuple(
            block_ids[last - 1 if self.kind == STATE else start_token // self.block_tokens : last]
        )


def token_stride(groups: Iterable[LayerGroup]) -> int:
    """The smallest number of tokens that fills whole blocks of every group with tokens. 0 without such groups."""
    sizes = [group.block_tokens for group in groups if group.kind == TOKENS]
    return lcm(*sizes) if sizes else 0


def check_overlap_layers(groups: Sequence[LayerGroup], overlap: OverlapSettings) -> None:
    """Raises ConfigError for a model with requests that cannot run before their last layers have arrived."""
    if not overlap.layer_count:
        return
    if len(groups) != 1 or not groups[0].keeps_all_tokens:
        names = ", ".join(group.name for group in groups)
        raise ConfigError(
            f"overlap_layers is {overlap.layer_count}, but the model has several kinds of cache ({names}), and vLLM "
            "has no hook that waits for each of them: set overlap_layers to 0",
            metadata={"field": "overlap_layers", "groups": names},
        )
    overlap.check(len(groups[0].layers))

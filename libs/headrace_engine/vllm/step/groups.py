"""Layers that share a block list per request, as the scheduler and the ranks speak of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm

from headrace_common.errors import ConfigError
from headrace_kv.layout.layout import STATE, TOKENS, GroupKind
from headrace_kv.receive.layer_overlap import OverlapSettings


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """One of vLLM's KV cache groups, the `index`th. `layers` are (number in the layout, name).

    Entry i of a request's block list holds tokens from i * block_tokens on; of a state, what is known after the last of
    these tokens that was computed. Groups may share their memory: a block belongs to one of them at a time.
    `block_format` says how a block is packed; it is empty where the attention kernels decide that.
    """

    index: int
    name: str
    kind: GroupKind
    head_count: int
    block_tokens: int
    block_format: str
    layers: tuple[tuple[int, str], ...]

    def blocks_between(
        self, block_ids: Sequence[int], start_token: int, end_token: int
    ) -> tuple[int, ...]:
        """The blocks of a request's list that hold tokens [start_token, end_token), or the state after them."""
        last = -(-end_token // self.block_tokens)
        return tuple(
            block_ids[last - 1 if self.kind == STATE else start_token // self.block_tokens : last]
        )


def token_stride(groups: Iterable[LayerGroup]) -> int:
    """Every so many tokens, each group's block ends that holds tokens. 0 where there are only states."""
    sizes = [group.block_tokens for group in groups if group.kind == TOKENS]
    return lcm(*sizes) if sizes else 0


def check_late_layers(groups: Sequence[LayerGroup], overlap_layers: OverlapSettings) -> None:
    """Raises ConfigError for a model whose requests cannot begin before their last layers are there."""
    if not overlap_layers.count:
        return
    if len(groups) != 1 or groups[0].kind != TOKENS:
        names = ", ".join(group.name for group in groups)
        raise ConfigError(
            f"overlap_layers is {overlap_layers.count}, but the model has several kinds of cache ({names}), of which "
            "vLLM waits for none by itself: set overlap_layers to 0",
            metadata={"field": "overlap_layers", "groups": names},
        )
    overlap_layers.check(len(groups[0].layers))

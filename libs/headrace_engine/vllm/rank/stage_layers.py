"""Joins what the pipeline stages have: each describes its own layers only. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from headrace_common.errors import ConfigError
from headrace_engine.vllm.rank.memory import Arena
from headrace_kv.layout.layout import CacheGroup


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The groups of the whole model, and the number of each stage's first layer."""

    groups: tuple[CacheGroup, ...]
    stage_starts: tuple[int, ...]

    def in_model(self, arena: Arena, stage: int) -> Arena:
        """A stage's arena with all groups, and with the numbers that its layers have in the whole model."""
        first = self.stage_starts[stage]
        regions = tuple(replace(one, layer=first + one.layer) for one in arena.regions)
        return replace(arena, groups=self.groups, regions=regions)


def join_stages(stages: Sequence[Sequence[CacheGroup]]) -> StageLayers:
    """Takes each stage's groups, with its layers numbered from 0.

    Raises ConfigError when a group differs between stages in anything but its layers.
    """
    counts = [sum(len(group.layers) for group in groups) for groups in stages]
    starts = tuple(accumulate(counts[:-1], initial=0))
    return StageLayers(
        tuple(_join(of_stages, starts) for of_stages in zip(*stages, strict=True)), starts
    )


def _join(of_stages: Sequence[CacheGroup], starts: Sequence[int]) -> CacheGroup:
    layers = tuple(
        start + layer
        for start, group in zip(starts, of_stages, strict=True)
        for layer in group.layers
    )
    # A group without layers in a stage has no parts there.
    found = {replace(group, layers=layers) for group in of_stages if group.layers}
    if len(found) != 1:
        raise ConfigError(
            f"the caches of group {of_stages[0].name} differ between pipeline stages: set pipeline_parallel_size to 1",
            metadata={"field": "pipeline_parallel_size"},
        )
    return found.pop()

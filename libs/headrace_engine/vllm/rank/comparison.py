"""Compares two blocks of a rank's KV memory, by layer and head. Needs torch only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.engine.v1 import link_pb2

if TYPE_CHECKING:
    from torch import Tensor

# Values that are small beside the others of their head differ more, relative to their own size.
_SMALLEST_SHARE = 0.05
_FP8_TYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def head_errors(received: Tensor, computed: Tensor) -> list[float]:
    """The relative difference of each head of a block. Both have the shape [heads, tokens, channels].

    It is 0 for equal values and about 1.4 for unrelated ones. K and V of a head, or some of its channels, may be much
    smaller than the others. So differences are relative to their own row and column. Kernels pack a block in their own
    order, and then a row is another part of it. Infinite where one value of a pair is no number. Where both are none,
    as with broken weights, the pair does not differ.
    """
    numbers = received.isfinite() | computed.isfinite()
    received, computed = received.where(numbers, 0.0), computed.where(numbers, 0.0)
    difference, reference = received - computed, computed
    errors = (_relative(difference, reference, dim) for dim in (1, 2))
    found = [max(pair) for pair in zip(*(one.tolist() for one in errors), strict=True)]
    return [error if math.isfinite(error) else math.inf for error in found]


def _relative(difference: Tensor, reference: Tensor, dim: int) -> Tensor:
    """Shape [heads]. Sums over `dim` first."""
    size = reference.square().sum(dim)
    smallest = _SMALLEST_SHARE**2 * size.mean(-1, keepdim=True)
    # Equal blocks of zeros do not differ.
    tiny = 1e-30
    return (difference.square().sum(dim) / (size.maximum(smallest) + tiny)).mean(-1).sqrt()


class BlockComparer:
    """Reads the KV tensors of a rank. Its compute thread calls `compare`."""

    def __init__(
        self,
        kv_caches: Mapping[str, Tensor],
        layers: Sequence[tuple[int, str]],
        first_head: int,
        cache_dtype: str,
    ) -> None:
        """`layers`: number in the layout and name. `cache_dtype`: vLLM's name of the type of quantized KV."""
        self._tensors = [(number, kv_caches[name]) for number, name in layers]
        self._first_head = first_head
        self._fp8_type = _FP8_TYPES.get(cache_dtype, "")

    def compare(self, received_block: int, computed_block: int) -> list[link_pb2.LayerErrors]:
        """How each layer of a received block differs from the computed one."""
        return [
            link_pb2.LayerErrors(
                layer=number,
                first_head=self._first_head,
                head_errors=head_errors(
                    self._values(tensor[received_block]), self._values(tensor[computed_block])
                ),
            )
            for number, tensor in self._tensors
        ]

    def _values(self, block: Tensor) -> Tensor:
        if block.element_size() == 1 and self._fp8_type:
            import torch

            block = block.view(getattr(torch, self._fp8_type))
        return block.float()

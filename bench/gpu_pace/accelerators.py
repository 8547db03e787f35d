"""How long steps and KV writes take on given accelerators, and the environment that makes engines take as long.

The times follow from public figures of the devices. Weights are read once a step at 0.7 of the memory's rate. Prompt
tokens are computed at 0.45 of the dense rate of bfloat16, and attention at the same rate.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

PACE: Final = "HEADRACE_GPU_PACE"
STEPS: Final = "HEADRACE_GPU_PACE_STEPS"
"""Environment variables of engines: the pace as numbers, and the folder of the files with their steps."""
_ROOT: Final = Path(__file__).resolve().parents[2]
_SITE: Final = Path(__file__).resolve().parent / "site"
_LAYERS: Final = 8
_TOKEN_BYTES: Final = 2 * _LAYERS * 32 * 4
"""KV of a token of the model that really runs: one head of 32 channels in float32."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What a step costs: `step_ms`, and `token_us` x (1 + context / `curve_tokens`) for each prompt token.

    A generating request also costs `read_us` for each token of its context. One link carries the KV that an engine
    sends, `link_tokens_per_s`.
    """

    step_ms: float
    token_us: float
    curve_tokens: float
    read_us: float
    link_tokens_per_s: float

    def slower(self, factor: float) -> Pace:
        """The same device, where all takes `factor` times as long."""
        return replace(
            self,
            step_ms=factor * self.step_ms,
            token_us=factor * self.token_us,
            read_us=factor * self.read_us,
            link_tokens_per_s=self.link_tokens_per_s / factor,
        )

    def taken_ms(self, prompt_parts: Iterable[tuple[int, int]], contexts: Iterable[int]) -> float:
        """A step's time. `prompt_parts`: (first position, tokens). `contexts`: of the requests that generate."""
        prompt_us = sum(
            tokens * self.token_us * (1 + (start + tokens / 2) / self.curve_tokens)
            for start, tokens in prompt_parts
        )
        return self.step_ms + 1e-3 * (prompt_us + self.read_us * sum(contexts))

    def prompt_ms(self, tokens: int, step_tokens: int) -> float:
        """The time of a prompt alone, in steps of `step_tokens`."""
        starts = range(0, tokens, step_tokens)
        return sum(
            self.taken_ms([(start, min(step_tokens, tokens - start))], ()) for start in starts
        )

    @property
    def link_bytes_per_s(self) -> float:
        """The link's rate for the KV of the model that really runs."""
        return _TOKEN_BYTES * self.link_tokens_per_s

    def variables(self, steps: Path) -> dict[str, str]:
        """The environment of engines that keep this pace and write their steps to files in the folder `steps`."""
        numbers = (self.step_ms, self.token_us, self.curve_tokens, self.read_us)
        path = (str(_SITE), str(_ROOT), os.environ.get("PYTHONPATH", ""))
        return {
            PACE: ",".join(map(repr, (*numbers, self.link_tokens_per_s))),
            STEPS: str(steps),
            "PYTHONPATH": ":".join(filter(None, path)),
        }

    @classmethod
    def from_environment(cls) -> Pace | None:
        """The pace of this process. None where it has none."""
        text = os.environ.get(PACE)
        return cls(*map(float, text.split(","))) if text else None


_LINK_BYTES_PER_S: Final = 50e9
ACCELERATORS: Final[Mapping[str, Pace]] = MappingProxyType(
    {
        # 16 GB of weights, 32 layers of 32 heads of 128 channels, 8 KV heads, at 3.35 TB/s and 990 TFLOP/s.
        "8b-h100": Pace(7.0, 36.0, 30_000, 0.056, _LINK_BYTES_PER_S / 131_072),
        # 141 GB of weights, 80 layers of 64 heads of 128 channels, 8 KV heads, on four devices.
        "70b-4xh100": Pace(14.0, 78.0, 53_000, 0.024, _LINK_BYTES_PER_S / 327_680),
    }
)
"""By name: a model in bfloat16 and its devices, with a network of 400 Gb/s."""


def paced_model() -> Path:
    """The folder of the model that paced engines run. Makes it if it is not there."""
    target = _ROOT / "models/tiny-llama-paced"
    shape = ("--layers", str(_LAYERS), "--heads", "2", "--kv-heads", "1", "--positions", "32768")
    command = (sys.executable, _ROOT / "scripts/make_tiny_model.py", *shape, "--target", target)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return target

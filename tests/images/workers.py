"""The images of the workers, and how workers of each kind start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.unit.test_architecture import ROOT

DECODE_STEP_S: Final = 0.05
TINY_MODEL: Final = ROOT / "models" / "tiny-llama"


@dataclass(frozen=True, slots=True)
class Workers:
    """Both workers have the same image but for their program.

    `lock` is the file in requirements/ that the image installs. `model` is the router's `--model`. `volumes` maps a
    folder of this host to its path in the containers. `temporary_mib` is the size of /tmp. `absent` are modules that
    the image must not have. `streams_slowly`: an answer takes so long that a service can be stopped in the middle.
    """

    tag: str
    lock: str
    flags: tuple[str, ...]
    model: str
    volumes: Mapping[Path, str]
    environment: tuple[str, ...]
    temporary_mib: int
    ready_timeout_s: float
    absent: tuple[str, ...]
    compilers: bool
    streams_slowly: bool


WORKERS: Final = {
    "sim": Workers(
        tag="sim",
        lock="sim",
        flags=(
            f"--model=sim:decode_step_s={DECODE_STEP_S}",
            "--served-model=sim",
        ),
        model="sim",
        volumes={},
        environment=(),
        temporary_mib=64,
        ready_timeout_s=120.0,
        absent=("torch", "vllm", "transformers", "pip"),
        compilers=False,
        streams_slowly=True,
    ),
    # As compose.yaml starts them.
    "vllm": Workers(
        tag="dev",
        lock="worker",
        flags=("--model=/models/tiny-llama", "--kv-cache-gib=0.25"),
        model="/models/tiny-llama",
        volumes={TINY_MODEL: "/models/tiny-llama"},
        environment=("OMP_NUM_THREADS=1", "VLLM_CPU_OMP_THREADS_BIND=nobind"),
        temporary_mib=1024,
        # With cgroupfs, podman's containers are one group, which gets one thread's share of a busy processor.
        ready_timeout_s=420.0,
        absent=("pip",),
        compilers=True,
        streams_slowly=False,
    ),
}

"""The cases of the RDMA test. Pure: the machines and the host that waits for them read the same list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.rdma.conformance import CASES

# The KV of a token has at least 4 KiB in all layouts, so that every request moves more than a megabyte.
MODELS: Mapping[str, str] = {
    "gqa": "sim:layers=2,heads=4,head_bytes=512",
    "mla": "sim:layers=2,heads=1,head_bytes=2048",
    "few-heads": "sim:layers=2,heads=2,head_bytes=1024",
    "nhd-to-hnd": "sim:layers=2,heads=4,head_bytes=512",
    "state-pages": (
        "sim:layers=2,heads=2,head_bytes=1024,"
        "state_layers=2,state_heads=2,state_parts=conv:4096/ssm:16384"
    ),
}
# Settings of prefill workers that differ from those of decode workers.
_PREFILL_ONLY: Mapping[str, str] = {"nhd-to-hnd": ",order=nhd"}
RANKS = (1, 2, 4)

WRITES = {case.__name__: f"write: {case.__name__}" for case in CASES}
WRITES_MOVED = "write: all of it by RDMA"
CONTROL = "control: over TCP no RDMA packet is sent"
CHAOS_FAULTS = "chaos: faults of every kind"
CHAOS_ANSWERS = "chaos: nothing wrong, late or unnamed"
CHAOS_FOREIGN = "chaos: foreign writes"
CHAOS_LEFT = "chaos: left behind"
CHAOS_MOVED = "chaos: the KV by RDMA"
CHAOS_CASES = (CHAOS_FAULTS, CHAOS_ANSWERS, CHAOS_FOREIGN, CHAOS_LEFT, CHAOS_MOVED)
VLLM_MOVED = "vllm: KV between two hosts"
VLLM_TOKENS = "vllm: tokens of one engine alone"
VLLM_SENT = "vllm: KV sent by prefill"
VLLM_CASES = (VLLM_MOVED, VLLM_TOKENS, VLLM_SENT)
# The file with the orders of the chaos machine.
SEED_VARIABLE = "HEADRACE_CHAOS_SEED"
REQUESTS_VARIABLE = "HEADRACE_CHAOS_REQUESTS"


@dataclass(frozen=True, slots=True)
class Group:
    """One prefill worker and some decode workers of one layout. Each pair gets a request, all at once."""

    layout: str
    prefill_ranks: int
    decode_ranks: tuple[int, ...]
    between_hosts: bool = False

    @property
    def model(self) -> str:
        """The model of the decode engines."""
        return MODELS[self.layout]

    @property
    def prefill_model(self) -> str:
        """The model of the prefill engine: the same model, possibly in another layout."""
        return self.model + _PREFILL_ONLY.get(self.layout, "")

    @property
    def prefill_id(self) -> str:
        """The settings of the prefill worker."""
        return f"prefill-{self.layout}-{self.prefill_ranks}"

    def decode_id(self, ranks: int) -> str:
        """The settings of a decode worker."""
        return f"decode-{self.layout}-{ranks}"

    def pair_name(self, ranks: int) -> str:
        """The name of the case of one decode worker in reports."""
        hosts = " on another host" if self.between_hosts else ""
        return f"serve: {self.layout} P{self.prefill_ranks} to D{ranks}{hosts}"

    def names(self) -> tuple[str, ...]:
        """The cases of all pairs."""
        return tuple(self.pair_name(ranks) for ranks in self.decode_ranks)


def _all_pairs(layout: str) -> tuple[Group, ...]:
    return tuple(Group(layout, ranks, RANKS) for ranks in RANKS)


LANES: Mapping[str, tuple[Group, ...]] = {
    "gqa": _all_pairs("gqa"),
    "mla": _all_pairs("mla"),
    "few-heads": _all_pairs("few-heads"),
    "arrangements": (Group("nhd-to-hnd", 1, (2,)), Group("state-pages", 2, (1,))),
}
"""Groups by machine in order. Neighbours with one layout share their decode workers."""
BETWEEN_HOSTS = (Group("gqa", 2, (4,), True), Group("mla", 4, (2,), True))

WRITES_ROLE = "writes"
CHAOS_ROLE = "chaos"
HOST_ROLES = ("host-1", "host-2")
VLLM_ROLES = ("vllm-host-1", "vllm-host-2")


@dataclass(frozen=True, slots=True)
class Job:
    """Machines that start and end together. `roles` names the job of each.

    A quiet machine with two cores takes a tenth of `timeout_s`. Emulation shares the cores with other processes.
    """

    name: str
    roles: tuple[str, ...]
    timeout_s: float = 1200.0
    memory_mib: int = 1536
    needs_vllm: bool = False
    """The machines get the host's Python packages, and a model."""

    def expected_names(self) -> tuple[str, ...]:
        """The results that the machines must report."""
        if self.roles == (WRITES_ROLE,):
            return (*WRITES.values(), WRITES_MOVED, CONTROL)
        if self.roles == (CHAOS_ROLE,):
            return CHAOS_CASES
        if self.roles == VLLM_ROLES:
            return VLLM_CASES
        groups = BETWEEN_HOSTS if self.roles == HOST_ROLES else LANES[self.name]
        return tuple(name for group in groups for name in group.names())


# The longest job first, so that the others run beside it.
JOBS = (
    Job("two-hosts", HOST_ROLES),
    Job("writes", (WRITES_ROLE,)),
    *(Job(lane, (lane,)) for lane in LANES),
)
CHAOS = Job("chaos", (CHAOS_ROLE,), timeout_s=2400.0, memory_mib=3072)
"""Runs only when selected by name, because it takes several minutes."""
VLLM = Job("vllm", VLLM_ROLES, timeout_s=3600.0, memory_mib=4096, needs_vllm=True)
"""Runs only when selected by name, because emulated machines import vLLM for minutes."""

"""`headrace profile` and `record`: write the times of workers, and the load of a router, for the simulator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

from headrace.inference.v1 import load_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import (
    WAIT_S,
    Wait,
    list_members,
    open_router_internally,
    registry_of,
    worker_status,
)
from headrace_cli.commands.route import find_internal
from headrace_cli.options import (
    DEFAULT_ROUTER,
    AddressedCommand,
    Registry,
    RequestModel,
    Router,
    RouterInternal,
)
from headrace_cli.output import command, notice_console, option
from headrace_common.callers.priority import Priority
from headrace_common.durations import unix_ns_from_timestamp
from headrace_common.errors import ConfigError
from headrace_common.registry.duties import COMPUTE_PROMPTS, GENERATE, WORKERS
from headrace_common.time_model.model import time_model_from_proto
from headrace_common.version import version
from headrace_kv.layout import layout_from_proto
from headrace_planner.settings import WorkerProfile, learned_profile
from headrace_simulator.trace import REQUESTS_MAX, TraceRequest

_DAY_S: Final = 86_400.0
_CLASSES: Final = {one.label: one for one in Priority}


@command(
    "profile",
    "headrace profile --output profile.json   |   headrace simulate --profile profile.json ...",
    cls=AddressedCommand,
)
async def profile(
    output: Annotated[Path, option("File for the profile, as JSON.", metavar="FILE")],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    model: RequestModel = "",
    wait: Wait = WAIT_S,
) -> None:
    """Writes what the workers of a model have learned of their times, as the mean, and the size of one."""

    members = await list_members(await registry_of(router, registry))
    models = {one.model for one in members if one.role in WORKERS}
    if len(named := models & {model} if model else models) != 1:
        known = ", ".join(sorted(models))
        raise ConfigError(f"workers serve {known or 'no model'}: name one of these with --model")
    workers = [one for one in members if one.role in WORKERS and one.model in named]
    statuses = await asyncio.gather(*(worker_status(one.endpoint) for one in workers))
    found = profile_of(workers, statuses)
    text = json.dumps(found.model_dump(mode="json"), indent=1)
    _write(output, f"{text}\n")
    notice_console().print(f"wrote {output}")


def profile_of(
    workers: Sequence[registry_pb2.Member], statuses: Sequence[worker_pb2.WatchStatusResponse]
) -> WorkerProfile:
    """The profile of the workers of one model. Raises ConfigError while their times are not known."""
    times = [time_model_from_proto(status.times, status.worker_id) for status in statuses]
    learned = learned_profile(
        [one for one, worker in zip(times, workers, strict=True) if worker.role in COMPUTE_PROMPTS],
        [one for one, worker in zip(times, workers, strict=True) if worker.role in GENERATE],
    )
    if learned is None:
        raise ConfigError(
            "the workers have not learned their times yet: send at least 5 prompts that are not cached, with answers "
            "of several tokens"
        )
    size, status = next(
        (worker, status)
        for worker, status in zip(workers, statuses, strict=True)
        if worker.role in GENERATE
    )
    layout = layout_from_proto(size.layout)
    return learned.model_copy(
        update={
            "kv_tokens": status.total_blocks * layout.block_tokens,
            "kv_bytes_per_token": round(layout.token_bytes),
            "max_num_seqs": size.max_num_seqs,
            "measured": f"headrace {version()}, {datetime.now(UTC).isoformat(timespec='seconds')}, model {size.model}: "
            f"the mean of {len(workers)} workers, from {learned.steps.prompt_steps} steps with prompts and "
            f"{learned.steps.answer_steps} with answers.",
        }
    )


@command(
    "record",
    "headrace record --output load.jsonl --seconds 600   |   "
    "headrace simulate --trace load.jsonl --profile profile.json",
    cls=AddressedCommand,
)
async def record(
    output: Annotated[Path, option("File for the trace.", metavar="FILE")],
    seconds: Annotated[
        float, option("Time after which it ends; or Ctrl-C.", min=1, max=_DAY_S)
    ] = _DAY_S,
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    internal: RouterInternal = "",
    wait: Wait = WAIT_S,
) -> None:
    """Records times, lengths, classes and shared prefixes of a router's requests. It records no text.

    The requests are those that arrive and are answered meanwhile.
    """

    found: list[load_pb2.RecordLoadResponse] = []
    endpoint = await find_internal(internal, registry, router)
    # It fails now rather than in the end.
    _write(output, "", "a")
    try:
        async with open_router_internally(endpoint) as client:
            async for one in client.load(seconds):
                found.append(one)
                if len(found) >= REQUESTS_MAX:
                    break
    finally:
        if found:
            _write(output, "".join(one.line() for one in trace_of(found)))
        lost = f", and lost {found[-1].lost_records}" if found and found[-1].lost_records else ""
        what = f"wrote {len(found)} requests to" if found else "recorded no requests, so it left"
        notice_console().print(f"{what} {output}{lost}", markup=False)


def trace_of(records: Sequence[load_pb2.RecordLoadResponse]) -> list[TraceRequest]:
    """The requests by arrival. The first arrives at 0 s."""
    arrived = sorted(
        (unix_ns_from_timestamp(one.arrival_time), place) for place, one in enumerate(records)
    )
    return [
        TraceRequest(
            number,
            1e-9 * (arrival_ns - arrived[0][0]),
            records[place].prompt_tokens,
            max(1, records[place].answer_tokens),
            # Ids of a trace have 62 bits.
            tuple(one >> 2 for one in records[place].prefix_hashes),
            _CLASSES.get(records[place].priority, Priority.NORMAL),
        )
        for number, (arrival_ns, place) in enumerate(arrived)
    ]


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None

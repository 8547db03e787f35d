"""`headrace profile`: writes what workers have learned of their times, which the simulator reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import WAIT_S, Wait, list_members, registry_of, worker_status
from headrace_cli.options import DEFAULT_ROUTER, AddressedCommand, Registry, RequestModel, Router
from headrace_cli.output import notice_console, run_command
from headrace_common.errors import ConfigError
from headrace_common.registry.duties import COMPUTE_PROMPTS, GENERATE, WORKERS
from headrace_common.time_model.model import time_model_from_proto
from headrace_common.version import version
from headrace_kv.layout import layout_from_proto
from headrace_planner.settings import WorkerProfile, learned_profile


def register(app: typer.Typer) -> None:
    """Adds `headrace profile`."""
    app.command(
        cls=AddressedCommand,
        epilog="Example:  headrace profile --output profile.json   |   headrace simulate --profile profile.json ...",
    )(profile)


@run_command
async def profile(
    output: Annotated[Path, typer.Option(metavar="FILE", help="File for the profile, as JSON.")],
    router: Router = DEFAULT_ROUTER,
    registry: Registry = "",
    model: RequestModel = "",
    wait: Wait = WAIT_S,
) -> None:
    """Writes what the workers of a model have learned of their times, as the mean, and the size of one."""

    members = await list_members(await registry_of(router, registry))
    workers = [one for one in members if one.role in WORKERS and (not model or one.model == model)]
    if len(models := sorted({one.model for one in workers})) != 1:
        raise ConfigError(f"workers serve {', '.join(models) or 'no model'}: name one with --model")
    statuses = await asyncio.gather(*(worker_status(one.endpoint) for one in workers))
    found = profile_of(workers, statuses)
    text = json.dumps(found.model_dump(mode="json"), indent=1)
    try:
        output.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from None
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

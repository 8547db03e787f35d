"""The registry's metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from opentelemetry.sdk.resources import Resource

from headrace.registry.v1 import registry_pb2
from headrace_common.config import ServiceConfig
from headrace_common.tasks import end_task, run_forever
from headrace_common.telemetry import schema
from headrace_common.telemetry.metrics.listener import metrics_served
from headrace_common.telemetry.metrics.process import Metrics
from headrace_registry.store.base import Store

_INTERVAL_S: Final = 1.0


@asynccontextmanager
async def recorded_metrics(store: Store, config: ServiceConfig) -> AsyncIterator[Metrics]:
    """Samples, exports and serves the metrics of a registry over the block, where the settings ask for it.

    Raises ConfigError when it cannot listen.
    """
    resource = Resource.create(
        {"service.name": "headrace-registry", "service.instance.id": config.internal_listen}
    )
    metrics = Metrics(resource, config.otlp_endpoint, readable=bool(config.metrics_keys_file))
    corrupt = metrics.store.gauge(schema.METRIC_CORRUPT_RECORDS)

    members = metrics.store.gauge(schema.METRIC_MEMBERS, schema.ATTRIBUTE_MEMBER_ROLE)

    async def sample() -> None:
        while True:
            corrupt.set(store.corrupt_record_count)
            members.replace(Counter(map(_role_name, store.members.values())))
            await asyncio.sleep(_INTERVAL_S)

    task = run_forever(sample(), "registry-metrics") if metrics.has_readers else None
    try:
        async with metrics_served(config, metrics):
            yield metrics
    finally:
        await end_task(task)
        await asyncio.to_thread(metrics.shutdown)


def _role_name(member: registry_pb2.Member) -> str:
    return registry_pb2.Member.Role.Name(member.role).removeprefix("ROLE_").lower()

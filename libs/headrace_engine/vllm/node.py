"""A host with ranks of an engine that another host serves: engine_args has a node_rank above 0."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

from headrace_common.errors import WorkerGone
from headrace_common.process.run import interruptible
from headrace_engine.config import EngineConfig
from headrace_engine.vllm.parallel import wait_for_end
from headrace_engine.vllm.service.launch import check_config, launch_ranks

log = logging.getLogger(__name__)


async def run_ranks(config: EngineConfig, drain_grace_s: float) -> None:
    """Runs this host's ranks until the engine ends. Must run on the main thread, before this process uses gRPC.

    On a signal the engine gets `drain_grace_s` to end, because its requests need these ranks. Without one, its end
    raises WorkerGone. Raises ConfigError when the ranks cannot start.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-", ignore_cleanup_errors=True) as folder:
        with interruptible():
            ranks = launch_ranks(config, check_config(config), Path(folder, "link"))
        log.info("the ranks of this host have loaded the model")
        ended = asyncio.create_task(asyncio.to_thread(wait_for_end, ranks))
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            log.info("the engine of these ranks may drain for up to %g s", drain_grace_s)
            await asyncio.wait({ended}, timeout=drain_grace_s)
            return
        finally:
            ranks.shutdown()
            await ended
    raise WorkerGone(
        "the engine on the host with node_rank 0 has ended, and this host's ranks with it"
    )

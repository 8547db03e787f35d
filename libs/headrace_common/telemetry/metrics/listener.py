"""Serves /metrics for Prometheus on `metrics_listen`, with the age of the latest turn of the event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Final

from headrace_common.access.credentials import TlsFiles
from headrace_common.access.key_file import key_digest, key_in, load_keys
from headrace_common.config import ServiceConfig
from headrace_common.http.bounds import HttpBounds
from headrace_common.http.exchange import HttpError, HttpExchange
from headrace_common.reloading import ReloadedFiles
from headrace_common.telemetry.metrics.process import Metrics
from headrace_common.telemetry.metrics.prometheus import content_type

_LOG = logging.getLogger(__name__)
_STUCK_S: Final = 5.0
_INTERVAL_S: Final = 0.5
_FRAMES: Final = 6


@contextmanager
def loop_watched(
    on_age: Callable[[float], None], *, stuck_s: float = _STUCK_S, interval_s: float = _INTERVAL_S
) -> Iterator[None]:
    """Over the block, a thread watches the running event loop.

    `on_age` gets the seconds for which the loop has been stuck, once that is longer than `stuck_s`, and 0 when it turns
    again. The log has the call in which it is stuck. `on_age` is called by the thread. Time in which the whole process
    stood still does not count.
    """
    watch = _LoopWatch(on_age, stuck_s, interval_s)
    thread = threading.Thread(target=watch.run, name="loop-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.close()


class _LoopWatch:
    def __init__(self, on_age: Callable[[float], None], stuck_s: float, interval_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._on_age = on_age
        self._stuck_s = stuck_s
        self._interval_s = interval_s
        self._closing = threading.Event()

    def close(self) -> None:
        """Ends the thread soon."""
        self._closing.set()

    def run(self) -> None:
        """Watches until `close`."""
        self._on_age(0.0)
        while not self._closing.wait(self._interval_s):
            age_s = self._wait_turn()
            if age_s > self._stuck_s:
                _LOG.warning("the event loop turns again, after %.1f s", age_s)
                self._on_age(0.0)

    def _wait_turn(self) -> float:
        """Returns when the loop has turned: for how many seconds it was stuck."""
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:
            # The loop is closed.
            self._closing.set()
            return 0.0
        age_s, reported = 0.0, False
        while not self._closing.is_set():
            start_s, start_cpu_s = time.monotonic(), time.process_time()
            if turned.wait(self._interval_s):
                break
            cpu_s = time.process_time() - start_cpu_s
            age_s += min(time.monotonic() - start_s, max(cpu_s, 2 * self._interval_s))
            if age_s > self._stuck_s:
                self._on_age(age_s)
                if not reported:
                    _LOG.warning("the event loop is stuck for %.1f s in: %s", age_s, self._stack())
                reported = True
        return age_s

    def _stack(self) -> str:
        """The innermost calls of the loop's thread."""
        frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - the documented way
        if frame is None:
            return "unknown"
        calls = traceback.extract_stack(frame)[-_FRAMES:]
        return " > ".join(f"{call.filename}:{call.lineno} {call.name}" for call in calls)


CONNECTIONS_MAX: Final = 16
_PATH: Final = "/metrics"
_PLAIN: Final = "text/plain; charset=utf-8"


@asynccontextmanager
async def metrics_served(config: ServiceConfig, metrics: Metrics) -> AsyncIterator[str]:
    """Serves the metrics over the block, if `metrics_listen` is set, and yields the URL, else an empty text.

    The event loop is watched meanwhile. Raises ConfigError when it cannot listen.
    """
    with loop_watched(metrics.loop_stall.set):
        async with _served(config, metrics) as url:
            yield url


@asynccontextmanager
async def _served(config: ServiceConfig, metrics: Metrics) -> AsyncIterator[str]:
    if not config.metrics_listen:
        yield ""
        return
    # Most processes serve no metrics, and the import takes 0.1 s.
    from headrace_common.http.server import HttpServer

    keys = None
    if config.metrics_keys_file:
        keys = load_keys(config.metrics_keys_file, "metrics_keys_file")
    server = HttpServer(
        _MetricsApp(metrics, keys),
        config.metrics_listen,
        setting="metrics_listen",
        tls=replace(TlsFiles.from_config(config), tls_authority_file=""),
        bounds=HttpBounds(CONNECTIONS_MAX),
    )
    server.start()
    url = f"{server.url}{_PATH}"
    _LOG.info("metrics are served on %s", url)
    try:
        yield url
    finally:
        await server.stop()


class _MetricsApp:
    """The application. Each connection has one request."""

    def __init__(self, metrics: Metrics, keys: ReloadedFiles[Mapping[str, str]] | None) -> None:
        """`keys`: None serves every caller."""
        self._metrics = metrics
        self._keys = keys

    async def __call__(self, exchange: HttpExchange) -> None:
        """Serves one HTTP request."""
        exchange.close_after()
        status = 200
        try:
            self._check(exchange)
            kind = content_type(exchange.headers.get("accept", ""))
            text = await asyncio.to_thread(self._metrics.text, kind)
            headers = {"content-type": kind}
        except HttpError as error:
            status, text = error.status, f"{error}\n"
            headers = {"content-type": _PLAIN, **error.headers}
        await exchange.respond(status, text.encode(), headers)

    def _check(self, exchange: HttpExchange) -> None:
        if exchange.method != "GET":
            raise HttpError(405, "method", "use GET", {"allow": "GET"})
        known = None if self._keys is None else self._keys.current()
        if known is not None and key_digest(key_in(exchange.headers.items())) not in known:
            raise HttpError(
                401,
                "key",
                "a key of metrics_keys_file is required; send it as header 'Authorization: Bearer KEY'",
                {"www-authenticate": "Bearer"},
            )
        if exchange.path != _PATH:
            raise HttpError(404, "unknown_path", f"this listener serves {_PATH} only")

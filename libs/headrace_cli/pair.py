"""The proxy: one address for a prefill and a decode vLLM server that hand KV caches over."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from headrace_common.config import split_host_port
from headrace_common.errors import (
    ConfigError,
    DeadlineExceeded,
    HeadraceError,
    InternalError,
    InvalidRequest,
    TransferTimeout,
    WorkerGone,
)
from headrace_common.identity import new_transfer_id
from headrace_common.logs import setup_logging

PAIRED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
PROMPT_TOKENS_MIN = 2
# Fields that only affect the answer, which prefill does not generate.
ANSWER_FIELDS = (
    "best_of",
    "echo",
    "logprobs",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "prompt_logprobs",
    "response_format",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "structured_outputs",
    "tool_choice",
    "top_logprobs",
)


def split(
    path: str,
    body: Mapping[str, Any],
    *,
    transfer_id: str,
    pair_address: tuple[str, int],
    remaining_s: float,
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The bodies for prefill and for decode, of a request for one prompt with one answer.

    None for any other request, which the decode server handles alone.
    """
    if path not in PAIRED_PATHS or not _is_single(body):
        return None
    common = {"transfer_id": transfer_id, "remaining_s": remaining_s}
    host, port = pair_address
    source = {"remote_host": host, "remote_port": port}
    prefill = {name: value for name, value in body.items() if name not in ANSWER_FIELDS}
    prefill |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True} | common}
    return prefill, {
        **body,
        "kv_transfer_params": {"do_remote_prefill": True} | common | source,
    }


def _json_object(method: str, content: bytes) -> dict[str, Any] | None:
    if method != "POST":
        return None
    try:
        body = json.loads(content)
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _is_single(body: Mapping[str, Any]) -> bool:
    if body.get("use_beam_search"):
        return False
    if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    if "messages" in body:
        return True
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and len(prompt) >= PROMPT_TOKENS_MIN
        and all(isinstance(token, int) for token in prompt)
    )


log = logging.getLogger(__name__)

_STATUSES: Final[Mapping[type[HeadraceError], HTTPStatus]] = {
    InvalidRequest: HTTPStatus.BAD_REQUEST,
    WorkerGone: HTTPStatus.BAD_GATEWAY,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
}
REQUESTS_MAX: Final = 4_096
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_CONNECT_S: Final = 5.0
_END_S: Final = 1.0
# Headers of one connection, which a proxy does not forward.
_HOP_HEADERS: Final = frozenset(
    {"connection", "expect", "host", "keep-alive", "transfer-encoding", "upgrade"}
)


@dataclass(frozen=True, slots=True)
class PairOptions:
    """Settings of the proxy. `prefill` and `decode` are URLs.

    `pair_address` is the prefill server's. `transfer_timeout_s` limits the wait for prefill, `timeout_s`
    the whole request.
    """

    prefill: str
    decode: str
    pair_address: str
    host: str
    port: int
    timeout_s: float
    transfer_timeout_s: float


class PairProxy:
    """Forwards requests. When prefill fails, decode computes the whole request."""

    def __init__(self, options: PairOptions, session: aiohttp.ClientSession) -> None:
        """Raises ConfigError for an address that is wrong."""
        self._options = options
        self._session = session
        self._prefill, self._decode = map(_checked_url, (options.prefill, options.decode))
        try:
            self._pair_address = split_host_port(options.pair_address)
        except ValueError as error:
            raise ConfigError(
                f"--pair-address {options.pair_address!r} is wrong: {error}"
            ) from error
        self._in_flight = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers a request. An error after the first bytes of an answer cuts it off."""
        self._in_flight += 1
        try:
            if self._in_flight > REQUESTS_MAX:
                raise WorkerGone(f"{REQUESTS_MAX} requests are in flight already")
            async with asyncio.timeout(self._options.timeout_s):
                return await self._answer(request)
        except TimeoutError:
            limit_s = f"{self._options.timeout_s:g}"
            return _error_response(DeadlineExceeded(f"the request took more than {limit_s} s"))
        except aiohttp.ClientError as error:
            why = str(error) or type(error).__name__
            return _error_response(WorkerGone(f"{self._decode} does not answer: {why}"))
        except RecursionError:
            return _error_response(InvalidRequest({"body": "has too many levels of JSON"}))
        except HeadraceError as error:
            return _error_response(error)
        finally:
            self._in_flight -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if (length := request.content_length or 0) > BODY_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(max_size=BODY_BYTES_MAX, actual_size=length)
        content = await request.read()
        body = _json_object(request.method, content) or {}
        if "kv_transfer_params" in body:
            # Clients must not choose where servers connect to.
            del body["kv_transfer_params"]
            content = json.dumps(body).encode()
        transfer_id = new_transfer_id()
        pair = split(
            request.path,
            body,
            transfer_id=transfer_id,
            pair_address=self._pair_address,
            remaining_s=self._options.transfer_timeout_s,
        )
        if pair is not None:
            of_prefill, of_decode = (json.dumps(one).encode() for one in pair)
            # Decode has received the whole cache before it responds, so prefill is not needed any more.
            prefill = asyncio.create_task(self._run_prefill(request, of_prefill))
            decode = asyncio.create_task(self._start(self._decode, request, of_decode))
            try:
                await asyncio.wait({decode, prefill}, return_when=asyncio.FIRST_COMPLETED)
                failure = prefill.exception() if prefill.done() else None
                if failure is None or decode.done():
                    return await _forward(request, *await decode)
                log.warning("decode computes the prompt of %s: %s", transfer_id, failure)
            finally:
                for task in (decode, prefill):
                    task.cancel()
                await asyncio.gather(decode, prefill, return_exceptions=True)
        return await _forward(request, *await self._start(self._decode, request, content))

    async def _start(
        self, url: str, request: web.Request, content: bytes
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Sends a request with this body. Returns the response and its first bytes. Raises ClientError."""
        response = await self._session.request(
            request.method,
            f"{url}{request.path_qs}",
            data=content,
            headers=_forwarded(request.headers, without="content-length"),
            allow_redirects=False,
        )
        try:
            return response, await response.content.readany()
        except BaseException:
            response.close()
            raise

    async def _run_prefill(self, request: web.Request, content: bytes) -> None:
        """Raises ClientError or WorkerGone when it fails, TransferTimeout when it takes too long."""
        try:
            async with asyncio.timeout(self._options.transfer_timeout_s):
                response, first = await self._start(self._prefill, request, content)
                async with response:
                    body = first + await response.read()
        except TimeoutError:
            limit_s = f"{self._options.transfer_timeout_s:g}"
            raise TransferTimeout(f"{self._prefill} took more than {limit_s} s") from None
        if response.status != HTTPStatus.OK:
            start = body[:300].decode(errors="replace")
            raise WorkerGone(f"{self._prefill} responded with {response.status} {start}")


async def _forward(
    request: web.Request, response: aiohttp.ClientResponse, first: bytes
) -> web.StreamResponse:
    """Sends a response to the client, and ends it. One that breaks is cut off."""
    reply = web.StreamResponse(
        status=response.status, reason=response.reason, headers=_forwarded(response.headers)
    )
    try:
        await reply.prepare(request)
        await reply.write(first)
        async for chunk in response.content.iter_any():
            await reply.write(chunk)
        await reply.write_eof()
    except BaseException:
        if request.transport is not None:
            request.transport.abort()
        raise
    finally:
        response.close()
    return reply


def _forwarded(headers: Mapping[str, str], *, without: str = "") -> tuple[tuple[str, str], ...]:
    left_out = {*_HOP_HEADERS, without}
    return tuple(pair for pair in headers.items() if pair[0].lower() not in left_out)


def _error_response(error: HeadraceError) -> web.Response:
    """A response with the error in the format of OpenAI's API."""
    log.warning("%s", error.detail)
    status = _STATUSES.get(type(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    content = {"message": error.detail, "type": error.reason, "code": int(status)}
    return web.json_response({"error": content}, status=status)


@web.middleware
async def _bugs_as_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception as error:
        log.exception("a request failed because of a bug")
        return _error_response(InternalError(f"{type(error).__name__}: {error}"))


def _checked_url(url: str) -> str:
    """The URL without a path. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or not port or parts.path not in ("", "/"):
        raise ConfigError(f"{url!r} is wrong: write it as http://host:port")
    return url.rstrip("/")


@asynccontextmanager
async def serving(options: PairOptions) -> AsyncIterator[int]:
    """Serves, and yields the port. Raises ConfigError for an invalid or used address."""
    session = aiohttp.ClientSession(
        auto_decompress=False,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
    )
    async with session:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_bugs_as_errors])
        app.router.add_route("*", "/{path:.*}", PairProxy(options, session).handle)
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            lingering_time=_END_S,
            shutdown_timeout=_END_S,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, options.host, options.port).start()
            yield runner.addresses[0][1]
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; set --port"
            ) from error
        finally:
            await runner.cleanup()


async def run_pair(options: PairOptions) -> None:
    """Serves until cancelled. Raises as `serving` does."""
    setup_logging("info", "pair", "")
    async with serving(options) as port:
        log.info(
            "serving %s and %s on http://%s:%d", options.prefill, options.decode, options.host, port
        )
        await asyncio.Event().wait()

"""The proxy: one address for a prefill and a decode vLLM server that hand KV caches over.

    python examples/pair.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

It needs the package aiohttp, which vLLM installs. docs/stock-vllm.md describes both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import aiohttp
from aiohttp import web

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


log = logging.getLogger("pair")

REQUESTS_MAX: Final = 4_096
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_CONNECT_S: Final = 5.0
_END_S: Final = 1.0
# Headers of one connection, which a proxy does not forward.
_HOP_HEADERS: Final = frozenset(
    {"connection", "expect", "host", "keep-alive", "transfer-encoding", "upgrade"}
)


class Failed(Exception):
    """A request that is answered with an error. `reason` is its type."""

    def __init__(self, status: HTTPStatus, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.reason = status, reason


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
        self._options = options
        self._session = session
        self._prefill, self._decode = options.prefill.rstrip("/"), options.decode.rstrip("/")
        host, _, port = options.pair_address.rpartition(":")
        self._pair_address = (host, int(port))
        self._in_flight = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers a request. An error after the first bytes of an answer cuts it off."""
        self._in_flight += 1
        try:
            if self._in_flight > REQUESTS_MAX:
                raise _gone(f"{REQUESTS_MAX} requests are in flight already")
            async with asyncio.timeout(self._options.timeout_s):
                return await self._answer(request)
        except TimeoutError:
            limit_s = f"{self._options.timeout_s:g}"
            detail = f"the request took more than {limit_s} s"
            return _error_response(Failed(HTTPStatus.GATEWAY_TIMEOUT, "DEADLINE_EXCEEDED", detail))
        except aiohttp.ClientError as error:
            why = str(error) or type(error).__name__
            return _error_response(_gone(f"{self._decode} does not answer: {why}"))
        except RecursionError:
            detail = "body: has too many levels of JSON"
            return _error_response(Failed(HTTPStatus.BAD_REQUEST, "INVALID_FIELD", detail))
        except Failed as error:
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
        transfer_id = uuid.uuid4().hex
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
        """Raises ClientError or Failed."""
        try:
            async with asyncio.timeout(self._options.transfer_timeout_s):
                response, first = await self._start(self._prefill, request, content)
                async with response:
                    body = first + await response.read()
        except TimeoutError:
            limit_s = f"{self._options.transfer_timeout_s:g}"
            raise _gone(f"{self._prefill} took more than {limit_s} s") from None
        if response.status != HTTPStatus.OK:
            start = body[:300].decode(errors="replace")
            raise _gone(f"{self._prefill} responded with {response.status} {start}")


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


def _gone(detail: str) -> Failed:
    return Failed(HTTPStatus.BAD_GATEWAY, "WORKER_GONE", detail)


def _error_response(error: Failed) -> web.Response:
    """A response with the error in the format of OpenAI's API."""
    log.warning("%s", error)
    content = {"message": str(error), "type": error.reason, "code": int(error.status)}
    return web.json_response({"error": content}, status=error.status)


@asynccontextmanager
async def serving(options: PairOptions) -> AsyncIterator[int]:
    """Serves, and yields the port. Raises OSError for a used address."""
    session = aiohttp.ClientSession(
        auto_decompress=False,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
    )
    async with session:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
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
        finally:
            await runner.cleanup()


async def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(
        description="Joins two vLLM servers with Headrace's connector."
    )
    parser.add_argument("--prefill", required=True, help="URL of the server that prefills")
    parser.add_argument("--decode", required=True, help="URL of the server that decodes")
    parser.add_argument("--pair-address", default="127.0.0.1:7730", help="prefill's `listen`")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--timeout", dest="timeout_s", type=float, default=600.0)
    parser.add_argument("--transfer-timeout", dest="transfer_timeout_s", type=float, default=60.0)
    options = PairOptions(**vars(parser.parse_args()))
    logging.basicConfig(level=logging.INFO)
    async with serving(options) as port:
        log.info("serving on http://%s:%d", options.host, port)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())

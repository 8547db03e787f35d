"""Sends requests over an OpenAI HTTP API."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from headrace_cli.load.run import Clock
from headrace_cli.load.sample import RequestFailure, RequestSample
from headrace_cli.load.workload import PlannedRequest
from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import ConfigError, WorkerGone

_LINE_BYTES_MAX: Final = 4 << 20


class HttpTarget:
    """Completions and chat completions of a server at `url`. `open_http` makes one."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = url
        self._model = model

    async def send(self, request: PlannedRequest, sample: RequestSample, clock: Clock) -> None:
        """See Target."""
        path, body = request_body(request, self._model)
        try:
            async with self._session.post(f"{self._url}{path}", json=body) as response:
                if response.status != 200:
                    text = await response.text()
                    raise RequestFailure(f"HTTP_{response.status}", " ".join(text.split())[:300])
                await _read(response, sample, clock)
        except TimeoutError as error:
            raise RequestFailure("TIMEOUT", "the answer did not end in time") from error
        except aiohttp.ClientError as error:
            raise RequestFailure("CONNECTION", f"{type(error).__name__}: {error}") from error

    async def model_names(self) -> list[str]:
        """The models that the server lists."""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                listed = await response.json()
                return [str(one["id"]) for one in listed["data"]]
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            raise WorkerGone(
                f"{self._url}/v1/models does not answer as expected: {error}"
            ) from error


@asynccontextmanager
async def open_http(
    url: str,
    model: str,
    *,
    api_key: str,
    timeout_s: float,
    concurrency: int,
    tls: TlsFiles,
) -> AsyncIterator[HttpTarget]:
    """A target at `url`, such as http://127.0.0.1:7056.

    `tls`: the authority to trust besides the system's, and a client's certificate.
    Raises ConfigError for another form.
    """
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(
            f"url {url!r}: write it as http://HOST:PORT or https://HOST:PORT",
            metadata={"field": "url"},
        )
    async with aiohttp.ClientSession(
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=concurrency, ssl=_tls_context(tls)),
        read_bufsize=_LINE_BYTES_MAX,
    ) as session:
        target = HttpTarget(session, base, model)
        if not model:
            names = await target.model_names()
            if len(names) != 1:
                raise ConfigError(
                    f"{base} serves {', '.join(names) or 'no model'}: choose one with --model",
                    metadata={"field": "model"},
                )
            target = HttpTarget(session, base, names[0])
        yield target


def _tls_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:
        if files.tls_authority_file:
            context.load_verify_locations(files.tls_authority_file)
        if files.tls_certificate_file:
            context.load_cert_chain(files.tls_certificate_file, files.tls_key_file)
    except OSError as error:
        raise ConfigError(
            f"a file of HEADRACE_TLS_* cannot be used: {error}; it must be PEM"
        ) from error
    return context


def request_body(request: PlannedRequest, model: str) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.exact:
        body["ignore_eos"] = True
    if request.messages:
        body["messages"] = [
            {"role": role, "content": content} for role, content in request.messages
        ]
        return "/v1/chat/completions", body
    body["prompt"] = request.text or list(request.token_ids)
    return "/v1/completions", body


async def _read(response: aiohttp.ClientResponse, sample: RequestSample, clock: Clock) -> None:
    """Reads the events of a streamed answer."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestFailure("STREAM_ERROR", str(event["error"])[:300])
        if event.get("usage"):
            usage = event["usage"]
            sample.count(usage["prompt_tokens"], usage["completion_tokens"])
        if any(_has_text(choice) for choice in event.get("choices", ())):
            sample.arrivals_s.append(clock())
    raise RequestFailure("CUT_OFF", "the stream ended without [DONE]")


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))

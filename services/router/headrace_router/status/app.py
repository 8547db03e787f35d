"""The application of `status_listen`: the page, and for operators its JSON document and changes of adapters."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Final

from headrace_common.access.authorizer import URI_NAMES, Authorizer
from headrace_common.access.roles import TOKEN_KEY
from headrace_common.callers.bounds import RequestInput
from headrace_common.errors import PermissionDenied, Unauthenticated
from headrace_common.http.exchange import HttpError, HttpExchange
from headrace_frontend.openai.errors import serve
from headrace_router.adapters import (
    BODY_BYTES_MAX,
    LOAD_PATH,
    UNLOAD_PATH,
    AdapterChanges,
    answer_http,
)
from headrace_router.status.reader import StatusReader

PAGE_PATH: Final = "/"
DOCUMENT_PATH: Final = "/status.json"
# The document has what this RPC returns, and topology that operators may list.
_RIGHT: Final = "/headrace.inference.v1.TraceService/GetTrace"
_METHODS: Final = {PAGE_PATH: "GET", DOCUMENT_PATH: "GET", LOAD_PATH: "POST", UNLOAD_PATH: "POST"}
_RIGHTS: Final = {
    DOCUMENT_PATH: _RIGHT,
    LOAD_PATH: "/headrace.inference.v1.AdapterService/LoadAdapter",
    UNLOAD_PATH: "/headrace.inference.v1.AdapterService/UnloadAdapter",
}
_DOCUMENT_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_TEXT_HEADERS: Final = {**_DOCUMENT_HEADERS, "content-type": "text/plain; charset=utf-8"}


class StatusApp:
    """Serves the page to every caller, and the rest to the role operator. The page itself has no data."""

    def __init__(
        self, reader: StatusReader, authorizer: Authorizer, adapters: AdapterChanges
    ) -> None:
        self._reader = reader
        self._adapters = adapters
        self._authorizer = authorizer
        self._page = files(__package__).joinpath("page.html").read_bytes()
        self._page_headers = {
            **_DOCUMENT_HEADERS,
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": content_policy(self._page),
            "referrer-policy": "no-referrer",
        }

    async def __call__(self, exchange: HttpExchange) -> None:
        """Serves one HTTP request."""
        await serve(exchange, self._serve(exchange))

    async def _serve(self, exchange: HttpExchange) -> None:
        path = exchange.path
        method = _METHODS.get(path)
        if method is None:
            raise HttpError(404, "unknown_path", f"use {PAGE_PATH} or {DOCUMENT_PATH}")
        if exchange.method != method:
            raise HttpError(405, "method", f"use {method} for {path}", {"allow": method})
        if path == PAGE_PATH:
            await exchange.respond(200, self._page, self._page_headers)
            return
        self._require_operator(exchange)
        if path == DOCUMENT_PATH:
            await exchange.respond(200, await self._reader.read(), _DOCUMENT_HEADERS)
            return
        with RequestInput(exchange.host):
            request = await exchange.json_body(BODY_BYTES_MAX)
        await exchange.respond(200, await answer_http(self._adapters, path, request), _TEXT_HEADERS)

    def _require_operator(self, exchange: HttpExchange) -> None:
        """Raises Unauthenticated or PermissionDenied."""
        path = exchange.path
        right = _RIGHTS[path]
        try:
            caller = self._authorizer.caller_of_metadata(right, exchange.headers.items())
            if caller is None:
                self._authorizer.caller_of_certificate(right, {URI_NAMES: exchange.peer_names})
        except Unauthenticated as error:
            raise Unauthenticated(
                f"{path} needs the role operator: send its token as header {TOKEN_KEY}, or its client "
                f"certificate; `headrace status` prints the address of the page with a token"
            ) from error
        except PermissionDenied as error:
            raise PermissionDenied(f"{path} is for the role operator only") from error


def content_policy(page: bytes) -> str:
    """Lets a browser run the page's own script and style, and call its own server only."""
    return (
        f"default-src 'none'; style-src {_hash_of(page, b'style')}; script-src {_hash_of(page, b'script')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(page: bytes, tag: bytes) -> str:
    content = page.partition(b"<%b>" % tag)[2].partition(b"</%b>" % tag)[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"

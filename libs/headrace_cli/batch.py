"""`headrace batch`: answers a file of requests with what a deployment has left."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import ssl
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headrace_cli.client import read_api_key
from headrace_cli.options import RequestModel
from headrace_cli.output import EXIT_FAILED, answer_console, command, notice_console, option
from headrace_common import ports
from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import ConfigError, HeadraceError, WorkerGone

_CALL_S: Final = 60.0
_POLL_S: Final = 0.5
# While its router restarts, others may answer that they have no such batch.
_LOST_S: Final = 120.0
_LOST_STATUS: Final = (404, 429, 503)
_ENDED: Final = ("completed", "failed", "expired", "cancelled")


@command(
    "batch",
    "headrace batch requests.jsonl   |   headrace batch requests.jsonl --output answers.jsonl",
)
def batch(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Requests as OpenAI's batches have them.")
    ],
    url: Annotated[
        str, option("Address of the OpenAI HTTP API, a router's http_listen.")
    ] = f"http://127.0.0.1:{ports.ROUTER_HTTP}",
    model: RequestModel = "",
    output: Annotated[
        Path | None,
        option("File for the answers; the default is FILE.output.jsonl.", metavar="FILE"),
    ] = None,
) -> None:
    """Runs a batch, and writes its answers, and lines without one to a second file. Ctrl-C cancels it."""
    output = output or file.with_name(f"{file.name}.output.jsonl")
    lines = list(_lines_of(file, model))
    api = _Api(url)
    asked = {
        "input_file_id": api.upload(file.name, lines),
        "endpoint": lines[0].get("url", "") if lines else "/v1/chat/completions",
        "completion_window": "24h",
    }
    made = api.ask("/batches", asked)
    try:
        ended = _followed(api, made)
    except KeyboardInterrupt:
        api.ask(f"/batches/{made['id']}/cancel", {})
        raise
    for error in (ended.get("errors") or {}).get("data", ()):
        notice_console().print(f"line {error.get('line')}: {error['message']}", markup=False)
    errors = output.with_name(f"{output.name}.errors")
    for name, path in (("output_file_id", output), ("error_file_id", errors)):
        if ended.get(name):
            with (
                api.open(f"/files/{ended[name]}/content") as content,
                path.open("wb") as target,
            ):
                shutil.copyfileobj(content, target)
            answer_console().print(f"{path}: {path.stat().st_size} bytes", markup=False)
    counts = ended["request_counts"]
    if ended["status"] != "completed" or counts["failed"]:
        state = f"{ended['id']} is {ended['status']}, {counts['failed']} lines failed"
        notice_console().print(state, markup=False)
        raise typer.Exit(EXIT_FAILED)


def _lines_of(file: Path, model: str) -> Iterator[dict[str, Any]]:
    """The requests in a file, with the model where one is given. Raises ConfigError."""
    with file.open("rb") as opened:
        for number, data in enumerate(opened, 1):
            if not data.strip():
                continue
            try:
                line = json.loads(data)
                body = line["body"]
                if model:
                    body["model"] = model
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"line {number} of {file} is no request: {error}") from error
            yield line


def _followed(api: _Api, made: Mapping[str, Any]) -> Mapping[str, Any]:
    """The batch at its end. Shows how far it is."""
    found, answered_s = made, time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=notice_console()) as progress:
        bar = progress.add_task(made["id"], total=None)
        while found["status"] not in _ENDED:
            time.sleep(_POLL_S)
            try:
                found, answered_s = api.ask(f"/batches/{made['id']}"), time.monotonic()
            except WorkerGone:
                if time.monotonic() > answered_s + _LOST_S:
                    raise
            counts = found["request_counts"]
            done = counts["completed"] + counts["failed"]
            progress.update(bar, completed=done, total=counts["total"] or None)
    return found


class _Api:
    """The OpenAI HTTP API at an address."""

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url is {url!r}; write http://HOST:PORT")
        self._url = f"{url.rstrip('/')}/v1"
        key = read_api_key()
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        files = TlsFiles.from_environment()
        self._tls = ssl.create_default_context(cafile=files.tls_authority_file or None)
        if files.tls_certificate_file:
            self._tls.load_cert_chain(files.tls_certificate_file, files.tls_key_file)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What a path answers, to an object if there is one. Raises HeadraceError."""
        data = None if body is None else json.dumps(body).encode()
        with self.open(path, data) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def open(self, path: str, data: bytes | None = None, kind: str = "application/json") -> Any:
        """The answer of a path. Raises HeadraceError."""
        headers = {**self._headers, "content-type": kind}
        request = Request(f"{self._url}{path}", data, headers)
        try:
            return urlopen(request, timeout=_CALL_S, context=self._tls)
        except HTTPError as error:
            message = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, KeyError, TypeError):
                message = json.loads(message)["error"]["message"]
            raised = WorkerGone if error.code in _LOST_STATUS else HeadraceError
            raise raised(message) from error
        except (OSError, HTTPException) as error:
            raise WorkerGone(f"{self._url} does not answer: {error}") from error

    def upload(self, name: str, lines: list[dict[str, Any]]) -> str:
        """The id of a new file."""
        boundary = secrets.token_hex(16)
        head = f"--{boundary}\r\ncontent-disposition: form-data; name="
        shown = name.replace('"', "_")
        data = "".join(f"{json.dumps(line)}\n" for line in lines)
        body = (
            f'{head}"purpose"\r\n\r\nbatch\r\n'
            f'{head}"file"; filename="{shown}"\r\n\r\n{data}\r\n--{boundary}--\r\n'
        )
        kind = f"multipart/form-data; boundary={boundary}"
        with self.open("/files", body.encode(), kind) as answer:
            return str(json.load(answer)["id"])

"""The lines of batches: what a client asks for, and what is answered."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import Field

from headrace_common.errors import InvalidRequest
from headrace_common.rpc.status import reported_error
from headrace_frontend.openai.batches.folder import DataFile
from headrace_frontend.openai.body import Body, LenientBody, parse_body
from headrace_frontend.openai.errors import error_object

LINES_MAX: Final = 50_000
"""Of one batch, as at OpenAI."""
ERRORS_MAX: Final = 100
"""Errors of the lines of one batch that a client gets."""
_PIECE_BYTES: Final = 65_536
_LOW: Final = {"priority": 1}
_REFUSED: Final = ("stream", "background")


class _LineBody(LenientBody):
    """A line of an input."""

    custom_id: Annotated[str, Field(min_length=1, max_length=256)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A line that asks for an answer. `body` is that of a request of the lowest class."""

    custom_id: str
    model: str
    body: bytes


NumberedLine: TypeAlias = tuple[int, bytes]


def pieces(path: Path, start: int, size: int, line_bytes_max: int) -> Generator[list[NumberedLine]]:
    """The lines of a file, in pieces, with their numbers. Divides a line that is too long. For a thread."""
    number = 0
    with path.open("rb") as file:
        file.seek(start)
        end = start + size
        while file.tell() < end:
            found: list[NumberedLine] = []
            piece_end = min(end, file.tell() + _PIECE_BYTES)
            while file.tell() < piece_end:
                number += 1
                data = file.readline(min(line_bytes_max, end - file.tell()))
                found.append((number, data))
            yield [(number, data) for number, data in found if data.strip()]


def lines_of(piece: Iterable[NumberedLine]) -> list[Line]:
    """What the lines of a file ask for that was checked. For a thread."""
    return [_line(json.loads(data)) for _, data in piece]


def _line(value: Mapping[str, Any]) -> Line:
    body = {**value["body"], **_LOW}
    if value["url"] == "/v1/responses":
        # They would take the room of those that the client goes on from.
        body.setdefault("store", False)
    return Line(value["custom_id"], body.get("model") or "", json.dumps(body).encode())


def shown_error(error: Exception, line: int | None = None) -> dict[str, Any]:
    """An error of a batch as OpenAI has it. A bug is logged."""
    found = error_object(reported_error(error, "a batch"))["error"]
    return {**{name: found[name] for name in ("code", "message", "param")}, "line": line}


class LineCheck:
    """Checks the lines of a batch, before any is answered."""

    def __init__(
        self,
        endpoint: str,
        kind: type[Body],
        check_json: Callable[[bytes], int],
        check_model: Callable[[str], object],
    ) -> None:
        """`kind` is that of the bodies. `check_json` and `check_model` raise InvalidRequest."""
        self._endpoint, self._kind = endpoint, kind
        self._check_json, self._check_model = check_json, check_model
        self.custom_ids: set[str] = set()
        """Those of the lines that are right."""
        self.errors: list[dict[str, Any]] = []
        """See `shown_error`."""

    def check(self, lines: Iterable[NumberedLine]) -> None:
        """Checks numbered lines. For a thread."""
        for number, data in lines:
            try:
                self._check_json(data)
                self.custom_ids.add(self._checked_id(parse_body(_LineBody, data)))
            except InvalidRequest as error:
                self.errors.append(shown_error(error, number))

    def _checked_id(self, line: _LineBody) -> str:
        if line.custom_id in self.custom_ids:
            raise InvalidRequest({"custom_id": "is that of an earlier line"})
        if line.url != self._endpoint:
            raise InvalidRequest({"url": f"must be {self._endpoint}, as in the batch"})
        if len(self.custom_ids) >= LINES_MAX:
            raise InvalidRequest({"body": f"is beyond {LINES_MAX} lines; divide the file"})
        try:
            if refused := [name for name in _REFUSED if line.body.get(name)]:
                raise InvalidRequest(dict.fromkeys(refused, "must be left out of a batch"))
            checked_json = json.dumps({**line.body, **_LOW}).encode()
            parse_body(self._kind, checked_json)
            self._check_model(line.body.get("model") or "")
        except InvalidRequest as error:
            named = {f"body.{name}": text for name, text in error.violations.items()}
            raise InvalidRequest(named, cause=error.cause) from error
        return line.custom_id


def response_json(status: int, request_id: str, body: bytes) -> bytes:
    """The response to a line. `body` is JSON."""
    head = json.dumps({"status_code": status, "request_id": request_id})
    return b'%b, "body": %b}' % (head[:-1].encode(), body)


def result_line(custom_id: str, response: bytes = b"null", error: bytes = b"null") -> bytes:
    """A line of an output file, as OpenAI has it. Response and error are JSON."""
    head = json.dumps({"id": f"batch_req_{os.urandom(12).hex()}", "custom_id": custom_id})
    return b'%b, "response": %b, "error": %b}\n' % (head[:-1].encode(), response, error)


class LineFile(DataFile):
    """A file of answered lines. It is the record of what is answered."""

    async def recover(self) -> set[str]:
        """The ids of the lines that are answered. A line without its end is cut off."""
        # Those of cancelled tasks.
        await self.append()
        size, found = await self.folder.run(self._recover)
        self.count(size - self.size)
        return found

    def _recover(self) -> tuple[int, set[str]]:
        size, found = 0, set[str]()
        if self.path.exists():
            with self.path.open("r+b") as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        file.truncate(size)
                        break
                    size += len(line)
                    found.add(json.loads(line)["custom_id"])
        return size, found

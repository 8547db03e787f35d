"""Uploads as multipart/form-data. The whole body lies in a file, and its parts are found there."""

from __future__ import annotations

import email
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

from headrace_common.errors import InvalidRequest
from headrace_common.http.exchange import HttpError

_HEAD_BYTES_MAX: Final = 4_096
_FIELD_BYTES_MAX: Final = 1_024
_PARTS_MAX: Final = 16
# A search holds up all threads.
_PIECE_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Upload:
    """A file in a body: where its bytes are, the client's name for it, and the other fields."""

    start: int
    size: int
    name: str
    fields: Mapping[str, str]


def boundary_of(headers: Mapping[str, str], origins: Collection[str]) -> bytes:
    """What divides the parts of an upload. Raises HttpError for a request that is none.

    `origins`: see FrontendConfig.http_origins.
    """
    if "origin" in headers and not {headers["origin"], "*"}.intersection(origins):
        # A page of another site can make a browser send this type, but not without this header.
        raise HttpError(
            403,
            "origin",
            "this page may not upload; send it from a server, or list its origin in http_origins",
        )
    message = email.message_from_string(f"content-type: {headers.get('content-type', '')}\n\n")
    boundary = message.get_boundary()
    if message.get_content_type() != "multipart/form-data" or not boundary:
        raise HttpError(415, "media_type", "send the file as multipart/form-data")
    return b"\r\n--" + boundary.encode("latin-1", "replace")


def read_upload(path: Path, boundary: bytes) -> Upload:
    """The upload in a body. Raises InvalidRequest."""
    file: tuple[int, int, str] | None = None
    fields: dict[str, str] = {}
    with path.open("rb") as data:
        read = partial(os.pread, data.fileno())
        start = read(_HEAD_BYTES_MAX, 0).find(boundary[2:]) + len(boundary) - 2
        for _ in range(_PARTS_MAX):
            head, is_whole, _ = read(_HEAD_BYTES_MAX, start).partition(b"\r\n\r\n")
            if start < len(boundary) - 2 or head.startswith(b"--"):
                break
            body = start + len(head) + len(is_whole)
            end = _find(read, boundary, body)
            if not is_whole or end < 0:
                raise InvalidRequest({"body": "is no whole multipart/form-data; send it again"})
            message = email.message_from_string(head.strip().decode(errors="replace"))
            name = str(message.get_param("name", "", "content-disposition"))
            if name == "file":
                file = body, end - body, message.get_filename("")
            else:
                value = read(min(end - body, _FIELD_BYTES_MAX), body)
                fields[name] = value.decode(errors="replace")
            start = end + len(boundary)
    if file is None:
        raise InvalidRequest({"file": "is missing; send the file as the part 'file'"})
    shown_name = PurePosixPath(file[2].replace("\\", "/")).name[:256]
    return Upload(file[0], file[1], shown_name or "file.jsonl", fields)


def _find(read: Callable[[int, int], bytes], wanted: bytes, start: int) -> int:
    """Where bytes are in a file, from `start` on. -1: nowhere."""
    size = _PIECE_BYTES + len(wanted) - 1
    while (data := read(size, start)) and (found := data.find(wanted)) < 0:
        start += _PIECE_BYTES
    return start + found if data else -1

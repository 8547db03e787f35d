"""Uploads as multipart/form-data. The whole body lies in a file, and its parts are found there."""

from __future__ import annotations

import email
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from headrace_common.errors import InvalidRequest
from headrace_common.http.exchange import HttpError

_HEAD_BYTES_MAX: Final = 4_096
_FIELD_BYTES_MAX: Final = 1_024
_PARTS_MAX: Final = 16


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
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(boundary[2:], 0, _HEAD_BYTES_MAX) + len(boundary) - 2
        for _ in range(_PARTS_MAX):
            if start < len(boundary) - 2 or data[start : start + 2] == b"--":
                break
            body = data.find(b"\r\n\r\n", start, start + _HEAD_BYTES_MAX) + 4
            end = data.find(boundary, body)
            if body < 4 or end < 0:
                raise InvalidRequest({"body": "is no whole multipart/form-data; send it again"})
            head = email.message_from_bytes(data[start:body].lstrip(b"\r\n"))
            name = str(head.get_param("name", "", "content-disposition"))
            if name == "file":
                file = body, end - body, head.get_filename("")
            else:
                value = data[body : min(end, body + _FIELD_BYTES_MAX)]
                fields[name] = value.decode(errors="replace")
            start = end + len(boundary)
    if file is None:
        raise InvalidRequest({"file": "is missing; send the file as the part 'file'"})
    shown_name = PurePosixPath(file[2].replace("\\", "/")).name[:256]
    return Upload(file[0], file[1], shown_name or "file.jsonl", fields)

"""The routes of files and batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal
from urllib.parse import parse_qsl

from pydantic import ConfigDict, Field

from headrace_common.access.key_file import key_digest, key_in
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.http.bounds import BODY_BYTES_PER_S, BODY_WAIT_S
from headrace_common.http.exchange import HttpError, HttpExchange
from headrace_frontend.openai.batches.batches import (
    BATCHES_PATH,
    PIECE_BYTES,
    BatchBody,
    Batches,
    save_file,
)
from headrace_frontend.openai.batches.folder import BATCH, FILE, DataFile, Entry, new_id
from headrace_frontend.openai.batches.upload import boundary_of, read_upload
from headrace_frontend.openai.body import LenientBody, checked_body
from headrace_frontend.openai.intake import ClientParts, Intake

_CONTENT_HEADERS: Final = {"content-type": "application/octet-stream"}


class _FileFields(LenientBody):
    """The fields of an upload beside the file."""

    model_config = ConfigDict(strict=False)

    purpose: Literal["batch"]
    anchor: Annotated[Literal["created_at"], Field(alias="expires_after[anchor]")] = "created_at"
    keep_s: Annotated[int, Field(alias="expires_after[seconds]", ge=3_600, le=2_592_000)] = (
        2_592_000
    )


class _Query(LenientBody):
    """What a client asks of a list."""

    model_config = ConfigDict(strict=False)

    after: str = ""
    limit: Annotated[int, Field(ge=1, le=10_000)] = 20
    order: Literal["asc", "desc"] = "desc"
    purpose: str = ""


class BatchRoutes:
    """/v1/files, /v1/batches and what is below them. A tenant finds its own entries only."""

    def __init__(self, parts: ClientParts, intake: Intake, batches: Batches | None) -> None:
        """`batches` is None where no folder is set."""
        self._parts, self._intake, self._batches = parts, intake, batches

    async def create_file(self, exchange: HttpExchange) -> None:
        """POST /v1/files. The body goes to the disk as it arrives."""
        tenant, batches = self._of(exchange)
        boundary = boundary_of(exchange.headers, self._parts.origins)
        folder, file_id = batches.folder, new_id(FILE)
        file = DataFile(folder, tenant, file_id)
        try:
            begun_s = time.monotonic()
            while part := await exchange.body_part():
                if not folder.has_room(tenant, len(part)):
                    remedy = "your files, those of batches included, take the room of batch_mib"
                    raise HttpError(413, "no_room", f"{remedy}; delete some")
                await file.append(part, lasting=False)
                if time.monotonic() - begun_s > BODY_WAIT_S + file.size / BODY_BYTES_PER_S:
                    raise HttpError(408, "body_timeout", "the file arrives too slowly")
            # With it, all of the file is synced.
            await file.append(b"\n")
            upload = await folder.run(lambda: read_upload(file.path, boundary))
            fields = checked_body(_FileFields, upload.fields)
        except BaseException:
            await file.remove()
            raise
        keep_s, start = fields.keep_s, upload.start
        await exchange.respond_object(
            await save_file(file, upload.name, "batch", upload.size, start, keep_s)
        )

    async def list_entries(self, kind: str, exchange: HttpExchange) -> None:
        """GET /v1/files and /v1/batches."""
        tenant, batches = self._of(exchange)
        query = checked_body(_Query, dict(parse_qsl(exchange.query)))
        found: Sequence[Entry] = [
            one
            for one in batches.folder.entries(kind, tenant)
            if query.purpose in ("", one.shown.get("purpose"))
        ]
        found = found if query.order == "desc" else found[::-1]
        ids = [one.id for one in found]
        if query.after and query.after not in ids:
            raise InvalidRequest({"after": "is not in this list; use the last_id of a page"})
        begin = ids.index(query.after) + 1 if query.after else 0
        end = begin + query.limit
        shown = [one.shown for one in found[begin:end]]
        edges = {"first_id": None, "last_id": None}
        if shown:
            edges = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]}
        fields = {"object": "list", "data": shown, "has_more": len(found) > end}
        await exchange.respond_object(fields | edges)

    async def create_batch(self, exchange: HttpExchange) -> None:
        """POST /v1/batches. It runs where its input is."""
        self._of(exchange)
        _, body = await self._intake.read(exchange, BatchBody)
        key = key_digest(key_in(exchange.headers.items())) if self._parts.tenants.keyed else ""
        given = {"host": exchange.host, "key": key, "body": body}
        await self._respond(exchange, body.input_file_id, "create", **given)

    async def use(self, operation: str, exchange: HttpExchange) -> None:
        """Answers with the result of an operation on the entry that the path names."""
        entry_id = exchange.path.strip("/").split("/")[2]
        kind = BATCH if exchange.path.startswith(BATCHES_PATH) else FILE
        if not entry_id.startswith(kind):
            raise InvalidRequest({"id": f"must begin with {kind!r}, not {entry_id[:64]!r}"})
        await self._respond(exchange, entry_id, operation)

    async def content(self, exchange: HttpExchange) -> None:
        """GET /v1/files/{id}/content."""
        tenant, batches = self._of(exchange)
        file_id = exchange.path.strip("/").split("/")[2]
        offset, is_whole = 0, False
        while not is_whole:
            try:
                piece = await batches.use(tenant, file_id, "content", offset=offset)
            except NotFound:
                if not exchange.started:
                    raise
                # It was deleted meanwhile. The connection ends, so that its client notices.
                return
            offset, is_whole = offset + len(piece), len(piece) < PIECE_BYTES
            await exchange.write(piece, _CONTENT_HEADERS)
        await exchange.finish()

    async def _respond(
        self, exchange: HttpExchange, entry_id: str, operation: str, **given: Any
    ) -> None:
        tenant, batches = self._of(exchange)
        await exchange.respond(200, await batches.use(tenant, entry_id, operation, **given))

    def _of(self, exchange: HttpExchange) -> tuple[str, Batches]:
        """The tenant, and the batches. Raises Unauthenticated, and HttpError where no folder is set."""
        tenant = self._intake.tenant_of(exchange)
        if self._batches is None:
            remedy = "files and batches are off here: set batch_folder of the router"
            raise HttpError(501, "batches_off", remedy)
        return tenant, self._batches

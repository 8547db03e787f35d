"""Batches: requests in a file, which are answered with what others leave of the workers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from headrace_common.callers.bounds import FewEach
from headrace_common.deadlines import Deadline
from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.tasks import end_task, run_forever
from headrace_frontend.openai.batches.folder import (
    BATCH,
    FILE,
    OUTPUTS,
    BatchFolder,
    DataFile,
    Entry,
    new_id,
)
from headrace_frontend.openai.batches.lines import (
    ERRORS_MAX,
    Line,
    LineCheck,
    LineFile,
    NumberedLine,
    lines_of,
    pieces,
    response_json,
    result_line,
    shown_error,
)
from headrace_frontend.openai.batches.serving import LineRoom, LineServer
from headrace_frontend.openai.block_apis.responses_bodies import ResponsesBody
from headrace_frontend.openai.block_apis.stored import Metadata
from headrace_frontend.openai.body import Body, LenientBody
from headrace_frontend.openai.intake import ClientParts
from headrace_frontend.openai.requests import ChatCompletionBody, CompletionBody
from headrace_frontend.request.computations import PARSE

_LOG = logging.getLogger(__name__)

BATCHES_PATH: Final = "/v1/batches"
KEEP_S: Final = 30 * 86_400
"""Files and ended batches are removed after this time."""
BATCHES_MAX: Final = 64
"""Of a tenant that have not ended. They run one after the other."""
PIECE_BYTES: Final = 1024**2
"""Of a file that are read at a time."""
_EXPIRY_INTERVAL_S: Final = 60.0
# Of a line beside the body of its request.
_LINE_BYTES: Final = 4_096
_NO_ROOM_S: Final = 1.0
# After a failure of the workers.
_TRIES_MAX: Final = 3
_RETRY_S_MAX: Final = 60.0
_EMPTY: Final = {"code": "empty_file", "message": "the file has no line", "line": 1}
_WINDOW: Final = re.compile(r"24h|(1?\d|2[0-3])h|\d{1,4}m|\d{1,5}s")
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600}
_BODIES: Final[Mapping[str, type[Body]]] = {
    "/v1/chat/completions": ChatCompletionBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
}


def _checked_window(window: str) -> str:
    if _WINDOW.fullmatch(window) is None:
        raise ValueError("must be 24h, or less, such as 30m or 90s")
    return window


class BatchBody(Body):
    """A request for a batch. Windows are shorter than OpenAI's where a client wants that."""

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, AfterValidator(_checked_window)]
    metadata: Metadata


class Arguments(LenientBody):
    """The arguments of an operation on an entry. `host` and `key` are those of a client: see LineServer."""

    offset: Annotated[int, Field(ge=0)] = 0
    body: BatchBody | None = None
    host: str = ""
    key: str = ""


@dataclass(slots=True, eq=False)
class _Running:
    """A batch that has not ended. `files` has its output and its errors."""

    entry: Entry
    server: LineServer
    files: Sequence[LineFile]
    end: str = ""
    """Why it ends before its last line: expired, cancelled or failed."""
    finishes: bool = False
    task: asyncio.Task[None] | None = None

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts its task, without what the current one has put into its context."""
        self.task = asyncio.create_task(work, context=Context())

    def stop(self, end: str) -> None:
        """Answers no more lines. Repeats are ignored."""
        if not (self.end or self.finishes) and self.task is not None:
            self.end = end
            self.task.cancel()

    def fail(self, errors: list[dict[str, Any]]) -> None:
        """It ends with these errors."""
        self.end = "failed"
        self.entry.change(errors={"object": "list", "data": errors[:ERRORS_MAX]})

    def finish(self) -> None:
        """It cannot be stopped any more."""
        self.finishes = True
        self.entry.change(status="finalizing", finalizing_at=int(time.time()))

    async def add(self, line: bytes, *, failed: bool) -> None:
        """A line is answered."""
        await self.files[failed].append(line)
        counts = self.entry.shown["request_counts"]
        counts["failed" if failed else "completed"] += 1

    async def recover(self) -> set[str]:
        """The ids of the lines that are answered, which are counted."""
        found = [await file.recover() for file in self.files]
        counts = self.entry.shown["request_counts"]
        counts["completed"], counts["failed"] = map(len, found)
        return set().union(*found)


class Batches:
    """The batches of this process. It goes on with those that an earlier process has left."""

    def __init__(self, parts: ClientParts, folder: BatchFolder) -> None:
        self._parts, self.folder = parts, folder
        self._room = LineRoom(parts)
        self._turns, self._checks = FewEach(), FewEach()
        self._running: dict[str, _Running] = {}
        for entry in reversed(folder.entries(BATCH)):
            if not entry.ended:
                self._start(entry)
        self._expiry = run_forever(self._remove_expired, "expiry of files")

    def _start(self, entry: Entry) -> None:
        server = LineServer(self._parts, entry)
        files = [LineFile(self.folder, entry.tenant, entry.kept[name]) for name in OUTPUTS]
        end = "cancelled" if entry.shown["status"] == "cancelling" else ""
        running = self._running[entry.id] = _Running(entry, server, files, end)
        running.run(self._run(running))

    async def drain(self, deadline: Deadline) -> None:
        """Starts no more lines, once the runner drains, and waits for those that run."""
        if tasks := [one.task for one in self._running.values() if one.task is not None]:
            await asyncio.wait(tasks, timeout=deadline.remaining_s())

    async def close(self) -> None:
        """Ends what runs. The next process on this folder goes on with it."""
        await end_task(self._expiry)
        for running in tuple(self._running.values()):
            await end_task(running.task)
        self.folder.close()

    async def use(self, tenant: str, entry_id: str, operation: str, **given: Any) -> bytes:
        """The result of an operation on a tenant's entry, which any router may have: JSON, or a piece of a file.

        Raises NotFound, and InvalidRequest.
        """
        arguments = Arguments(**given)
        found = await self.use_here(tenant, entry_id, operation, arguments)
        if found is None and entry_id.startswith((FILE, BATCH)):
            sent = arguments.model_dump_json(exclude_unset=True).encode()
            found = await self._parts.ask_elsewhere(tenant, entry_id, operation, sent)
        if found is None:
            raise NotFound(
                f"{entry_id[:64]} is not here: it never was, was deleted, has expired, or its router does not answer",
                metadata={"id": entry_id[:64]},
            )
        return found

    async def use_here(
        self, tenant: str, entry_id: str, operation: str, given: Arguments
    ) -> bytes | None:
        """As `use`. None when this process does not have the entry."""
        entry = self.folder.find(tenant, entry_id)
        if entry is None:
            return None
        result = entry.shown
        match operation, entry_id.startswith(BATCH):
            case "retrieve", _:
                pass
            case "cancel", True:
                await self._cancel(entry)
            case "create", False if given.body is not None:
                result = await self._create(entry, given.body, given.host, given.key)
            case "delete", False:
                await self._delete(entry)
                result = {"id": entry_id, "object": "file", "deleted": True}
            case "content", False:
                return await self.folder.run(partial(self._piece, entry, given.offset))
            case _:
                raise InvalidRequest({"id": f"names no entry for {operation}"})
        return json.dumps(result).encode()

    async def _create(self, file: Entry, asked: BatchBody, host: str, key: str) -> dict[str, Any]:
        """Creates a batch of the lines of a file."""
        tenant, now = file.tenant, int(time.time())
        if file.shown["purpose"] != "batch":
            raise InvalidRequest({"input_file_id": "must be a file with purpose batch"})
        if sum(one.entry.tenant == tenant for one in self._running.values()) >= BATCHES_MAX:
            remedy = f"has {BATCHES_MAX} before it; wait for one to end, or cancel one"
            raise InvalidRequest({"batch": remedy})
        if not self.folder.has_room(tenant):
            raise InvalidRequest({"batch": "has no room in batch_mib; delete files"})
        window = asked.completion_window
        shown = {
            "id": new_id(BATCH),
            "object": "batch",
            "endpoint": asked.endpoint,
            "input_file_id": file.id,
            "completion_window": window,
            "status": "validating",
            "created_at": now,
            "expires_at": now + int(window[:-1]) * _UNITS_S[window[-1]],
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": asked.metadata,
        }
        kept = {"host": host, "key": key, "until": now + KEEP_S}
        entry = Entry(tenant, shown, kept | {name: new_id(FILE) for name in OUTPUTS})
        # It counts before others are created.
        self._start(entry)
        await self.folder.save(entry)
        return shown

    async def _cancel(self, entry: Entry) -> None:
        running = self._running.get(entry.id)
        if running is None or running.finishes:
            status = entry.shown["status"]
            raise InvalidRequest({"status": f"is {status}, and such a batch cannot be cancelled"})
        if not running.end:
            entry.change(status="cancelling", cancelling_at=int(time.time()))
            await self.folder.save(entry)
            running.stop("cancelled")

    async def _delete(self, file: Entry) -> None:
        for running in self._running.values():
            if running.entry.shown["input_file_id"] == file.id:
                remedy = f"is the input of {running.entry.id}; cancel that first"
                raise InvalidRequest({"id": remedy})
        await self.folder.remove(file)

    def _piece(self, file: Entry, offset: int) -> bytes:
        """A part of a file, empty at its end."""
        with self.folder.path(file.id).open("rb") as data:
            data.seek(file.kept["start"] + offset)
            return data.read(max(0, min(PIECE_BYTES, file.shown["bytes"] - offset)))

    async def _remove_expired(self) -> None:
        while True:
            inputs = {one.entry.shown["input_file_id"] for one in self._running.values()}
            for entry in self.folder.entries():
                if (
                    entry.kept["until"] <= time.time()
                    and entry.id not in inputs | self._running.keys()
                ):
                    await self.folder.remove(entry)
            await asyncio.sleep(_EXPIRY_INTERVAL_S)

    async def _run(self, running: _Running) -> None:
        entry = running.entry
        loop = asyncio.get_running_loop()
        left_s = entry.shown["expires_at"] - time.time()
        expiry = loop.call_later(max(0.0, left_s), running.stop, "expired")
        try:
            is_whole = bool(running.end) or await self._advance(running)
        except asyncio.CancelledError:
            if not running.end:
                raise
            is_whole = True
        except Exception as error:  # noqa: BLE001 - the batch has its error
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            running.fail([shown_error(first)])
            is_whole = True
        try:
            if is_whole:
                running.finish()
                await self._finish(running)
        except Exception:  # noqa: BLE001 - the same
            _LOG.exception("the end of %s cannot be stored; a restart does so", entry.id)
        finally:
            expiry.cancel()
            del self._running[entry.id]

    async def _advance(self, running: _Running) -> bool:
        """Checks and answers the lines. False when the router drains before the last."""
        entry = running.entry
        if entry.shown["status"] == "validating":
            total, errors = await self._checked(entry)
            entry.change(request_counts={"total": total, "completed": 0, "failed": 0})
            if errors:
                running.fail(errors)
                return True
            entry.change(status="in_progress", in_progress_at=int(time.time()))
            await self.folder.save(entry)
        async with self._turns.of(entry.tenant):
            answered = await running.recover()
            async with asyncio.TaskGroup() as group, aclosing(self._lines(entry)) as lines:
                async for line in lines:
                    if line.custom_id in answered:
                        continue
                    model = await self._place_of(entry.tenant, line)
                    if not model:
                        break
                    task = group.create_task(self._answer(running, line))
                    task.add_done_callback(partial(self._room.end, model))
        counts = entry.shown["request_counts"]
        return bool(counts["completed"] + counts["failed"] == counts["total"])

    async def _place_of(self, tenant: str, line: Line) -> str:
        """The model of a line, once there is room for it and for its answer. Empty once the router drains."""
        while not (self.folder.has_room(tenant) or self._parts.runner.draining):  # noqa: ASYNC110
            await asyncio.sleep(_NO_ROOM_S)
        try:
            model = self._parts.preparer.choice(line.model).model
        except InvalidRequest:
            # An adapter that is gone. The line gets that error in its turn.
            model = min(self._parts.codecs)
        return model if await self._room.take(model) else ""

    async def _pieces(self, entry: Entry) -> AsyncGenerator[list[NumberedLine]]:
        """The lines of its input."""
        file = self.folder.find(entry.tenant, entry.shown["input_file_id"])
        if file is None:
            raise InvalidRequest({"input_file_id": "is not stored any more"})
        path, start = self.folder.path(file.id), file.kept["start"]
        line_max = self._parts.body_bytes_max + _LINE_BYTES
        found = pieces(path, start, file.shown["bytes"], line_max)
        try:
            while (piece := await self.folder.run(partial(next, found, None))) is not None:
                yield piece
        finally:
            # After what may still run on the thread.
            await self.folder.run(found.close)

    async def _lines(self, entry: Entry) -> AsyncGenerator[Line]:
        async with aclosing(self._pieces(entry)) as found:
            async for piece in found:
                for line in await self.folder.run(partial(lines_of, piece)):
                    yield line

    async def _checked(self, entry: Entry) -> tuple[int, list[dict[str, Any]]]:
        """The number of right lines, and errors."""
        preparer, endpoint = self._parts.preparer, entry.shown["endpoint"]
        check_json = self._parts.size.check_json
        check = LineCheck(endpoint, _BODIES[endpoint], check_json, preparer.choice)
        async with self._checks.of(entry.tenant), aclosing(self._pieces(entry)) as found:
            async for piece in found:
                work = partial(check.check, piece)
                await preparer.threads.run(entry.tenant, PARSE, PARSE.loop_max + 1, work)
                if len(check.errors) >= ERRORS_MAX:
                    break
        total = len(check.custom_ids)
        return total, check.errors or ([] if total else [_EMPTY])

    async def _answer(self, running: _Running, line: Line) -> None:
        """Answers a line. It stays without an answer when the router drains."""
        tries = 1
        exchange = await running.server.answer(line.body)
        while exchange.status in (429, 503):
            if self._parts.runner.draining:
                return
            if (tries >= _TRIES_MAX) if exchange.status == 503 else not exchange.retry_s:
                break
            await asyncio.sleep(min(_RETRY_S_MAX, tries * max(1.0, exchange.retry_s)))
            tries += 1
            exchange = await running.server.answer(line.body)
        response = response_json(exchange.status, exchange.request_id, exchange.data)
        await running.add(result_line(line.custom_id, response), failed=exchange.status != 200)

    async def _finish(self, running: _Running) -> None:
        """Stores the end of a batch, with its files."""
        entry, end = running.entry, running.end or "completed"
        answered = await running.recover()
        # Lines that were not checked may have no id.
        if end in ("expired", "cancelled") and "in_progress_at" in entry.shown:
            message = f"the batch was {end} before this line was answered"
            error = json.dumps({"code": f"batch_{end}", "message": message}).encode()
            _, errors = running.files
            left = [
                result_line(line.custom_id, error=error)
                async for line in self._lines(entry)
                if line.custom_id not in answered
            ]
            await errors.append(*left)
            await running.recover()
        now = int(time.time())
        for name, file in zip(OUTPUTS, running.files, strict=True):
            if file.size:
                entry.change(**{f"{name}_file_id": file.file_id})
                await save_file(file, f"{entry.id}_{name}.jsonl", "batch_output", file.size)
        entry.change(**{"status": end, f"{end}_at": now})
        await self.folder.save(entry)


async def save_file(
    file: DataFile, name: str, purpose: str, size: int, start: int = 0, keep_s: int = KEEP_S
) -> dict[str, Any]:
    """Makes a part of the data a file of its tenant, as OpenAI has it."""
    now = int(time.time())
    shown = {
        "id": file.file_id,
        "object": "file",
        "bytes": size,
        "created_at": now,
        "expires_at": now + keep_s,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
    }
    entry = Entry(file.tenant, shown, {"start": start, "until": now + keep_s}, file.size)
    await file.folder.save(entry)
    return shown

"""The lies of a hostile worker in a chaos run. They stay within its role, and within the bounds of fields.

It records each request before it lies about it, so the run knows which answers may be wrong.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from headrace.decode.v1 import decode_pb2
from headrace.kv.v1 import handoff_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.deadlines import Deadline
from headrace_decode.attempt import DecodeAttempt
from headrace_decode.attempts import Attempts
from headrace_decode.link.outgoing import Outgoing
from headrace_kv.send.stream import HandoffStream, StreamItem
from headrace_prefill.pull import PullSession
from tests.chaos.tiers import put

_VOCABULARY: Final = 32_000
_HUGE: Final = 2**32 - 1
_UNKNOWN: Final = "x" * 32
_ACCUSES_EACH_S: Final = 4


def served_by_hostile(folder: Path) -> set[str]:
    """The ids of the requests that hostile workers have got until now."""
    files = folder.glob("hostile-*.txt")
    return {name for path in files for name in path.read_text(encoding="utf-8").splitlines()}


class Lies:
    """Draws lies, counts them, and records the requests that the worker gets."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._random = random.Random(f"{seed}/lies/{os.getpid()}")
        self._counts: Counter[str] = Counter()
        self._counts_file = folder / f"wire-{os.getpid()}.json"
        self._requests_file = folder / f"hostile-{os.getpid()}.txt"
        self.senders: set[tuple[str, str]] = set()
        """Workers that have opened a handoff, and their incarnations."""

    def install(self) -> None:
        """Makes this process lie."""
        self._answer_wrong()
        self._report_wrong()
        self._send_wrong()

    def _got(self, request_id: str) -> None:
        with self._requests_file.open("a", encoding="utf-8") as file:
            file.write(f"{request_id}\n")

    def _draws(self, lie: str, share: float) -> bool:
        if self._random.random() >= share:
            return False
        self._counts[f"lie: {lie}"] += 1
        self._counts_file.write_text(json.dumps(self._counts), encoding="utf-8")
        return True

    # A decode worker to routers.

    def _answer_wrong(self) -> None:
        start, next_message = Attempts.start, Outgoing.next_message

        async def started(
            attempts: Attempts, request: decode_pb2.GenerateRequest, deadline: Deadline
        ) -> DecodeAttempt:
            self._got(request.request_id)
            return await start(attempts, request, deadline)

        def spoiled(
            outgoing: Outgoing, *, holds_tokens: bool = False
        ) -> decode_pb2.LinkResponse | None:
            message = next_message(outgoing, holds_tokens=holds_tokens)
            if message is not None:
                self._spoil(message)
            return message

        put(Attempts, "start", started)
        put(Outgoing, "next_message", spoiled)

    def _spoil(self, message: decode_pb2.LinkResponse) -> None:
        columns = message.tokens
        if columns.token_ids:
            index = self._random.randrange(len(columns.token_ids))
            if self._draws("wrong token", 0.2):
                columns.token_ids[index] = (columns.token_ids[index] + 1) % _VOCABULARY
            if self._draws("token beyond the vocabulary", 0.02):
                columns.token_ids[index] = _HUGE
            if self._draws("columns of other lengths", 0.01):
                columns.token_counts[0] += 7
            if self._draws("tokens of an unknown request", 0.05):
                columns.stream_ids.append(1 << 40)
                columns.token_counts.append(1)
                columns.token_ids.append(5)
        for one in message.reserved:
            if self._draws("wrong size of a reservation", 0.05):
                one.reserved.end_token = _HUGE
        for ended in message.finished:
            if self._draws("wrong counts at the end", 0.1):
                ended.finished.cached_tokens = ended.finished.transferred_tokens = _HUGE

    def _report_wrong(self) -> None:
        status = Attempts.status

        def accusing(attempts: Attempts) -> worker_pb2.WatchStatusResponse:
            found = status(attempts)
            found.total_blocks *= 16
            # Otherwise no prefill worker would send it anything.
            if int(time.monotonic()) % _ACCUSES_EACH_S == 0 and self._draws("accusations", 1.0):
                for worker_id, incarnation in self.senders:
                    found.distrusted_workers.add(
                        worker_id=worker_id, incarnation=incarnation, detail="it sends wrong KV"
                    )
            return found

        put(Attempts, "status", accusing)

    # A decode worker to prefill workers.

    def answers(
        self, response: handoff_pb2.HandoffResponse
    ) -> Iterator[handoff_pb2.HandoffResponse]:
        """What it sends in place of a message of a handoff stream."""
        if response.HasField("reservation"):
            if self._draws("silence after an Open", 0.2):
                return
            if self._draws("blocks beyond the memory", 0.1):
                response.reservation.block_ids.extend([_HUGE] * 3)
                response.reservation.end_token += 1
        yield response

    # A prefill worker to routers.

    def reports(self, request: prefill_pb2.PullRequest) -> Iterable[prefill_pb2.PullRequest]:
        """What it sends in place of a message of a pull stream."""
        if request.HasField("first_token"):
            if self._draws("wrong first token", 0.2):
                request.first_token.token_id = (request.first_token.token_id + 1) % _VOCABULARY
            if self._draws("first token beyond the vocabulary", 0.05):
                request.first_token.token_id = _HUGE
        yield request
        if not request.HasField("hello") and self._draws("reports of unknown tasks", 0.2):
            first = prefill_pb2.FirstToken(transfer_id=_UNKNOWN, token_id=7)
            started = prefill_pb2.TaskStarted(transfer_id=_UNKNOWN)
            yield prefill_pb2.PullRequest(started=started)
            yield prefill_pb2.PullRequest(first_token=first)
            yield prefill_pb2.PullRequest(done=prefill_pb2.TaskDone(transfer_id=_UNKNOWN))

    # A prefill worker to decode workers.

    def _send_wrong(self) -> None:
        start_task, send = PullSession._start_task, HandoffStream.send

        def started(session: PullSession, task: prefill_pb2.PrefillTask) -> None:
            self._got(task.request_id)
            start_task(session, task)

        def spoiled(stream: HandoffStream, item: StreamItem) -> None:
            for one in self._items(item):
                send(stream, one)

        put(PullSession, "_start_task", started)
        put(HandoffStream, "send", spoiled)

    def _items(self, item: StreamItem) -> Iterator[StreamItem]:
        if isinstance(item, handoff_pb2.LayerDone):
            if self._draws("wrong size of a layer", 0.01):
                item.payload_bytes += 1
            elif self._draws("tokens beyond the transfer", 0.01):
                item.end_token = _HUGE
            elif self._draws("unknown layer", 0.01):
                item.layer = _HUGE
            elif self._draws("layer of an unknown transfer", 0.05):
                yield handoff_pb2.LayerDone(transfer_id=_UNKNOWN, payload_bytes=1, end_token=1)
        elif item.HasField("open"):
            if self._draws("open of an unknown transfer", 0.2):
                opening = handoff_pb2.Open(transfer_id=_UNKNOWN, ticket=b"x" * 64)
                yield handoff_pb2.HandoffRequest(open=opening)
            if self._draws("commit of nothing", 0.05):
                yield item
                commit = handoff_pb2.Commit(transfer_id=item.open.transfer_id)
                yield handoff_pb2.HandoffRequest(commit=commit)
                return
        yield item

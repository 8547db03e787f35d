"""An engine that yields the events that a test scripts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from headrace_engine.interface import (
    AnswerSink,
    Arrived,
    DecodeEvent,
    DecodeTokens,
    DecodeWork,
    Engine,
    EngineUsage,
    FirstHiddenState,
    FirstToken,
    PrefillOutcome,
    PrefillWork,
    Recompute,
    Released,
    TransferEvent,
)
from headrace_kv.layout import KvDescriptor, KvLayout, RankMemory, WorkerRef
from headrace_kv.messages import SendReport
from headrace_kv.shard_map import place_regions

REF = WorkerRef("decode-0", "00112233445566ff")
LAYOUT = KvLayout.attention(
    model="m", dtype="float32", layer_count=2, kv_head_count=2, block_tokens=16, parts={"kv": 4}
)


Step: TypeAlias = DecodeEvent | Exception | None


class ScriptedEngine(Engine):
    """Yields what is in `script`, raises exceptions, and ends with None. `scripts` has scripts of single requests."""

    def __init__(self) -> None:
        memory = RankMemory(
            0, "in_memory", "s", 0, 1 << 20, place_regions(LAYOUT, 0, (33,)).regions
        )
        self.descriptor = KvDescriptor(LAYOUT, (memory,))
        self.max_model_len = 256
        self.vocabulary_size = 32_000
        self.script: asyncio.Queue[Step] = asyncio.Queue()
        self.scripts: dict[str, asyncio.Queue[Step]] = {}
        self.works: list[DecodeWork] = []
        self.arrived_ids: list[str] = []
        self.first_tokens: list[tuple[str, int]] = []
        self.first_hidden_state_given: list[tuple[str, bytes]] = []
        self.released_ids: list[str] = []
        self.closed = 0

    def play(self, *events: Step) -> None:
        """Appends to the script."""
        for event in events:
            self.script.put_nowait(event)

    def play_for(self, transfer_id: str, *events: Step) -> None:
        """Appends to the script of one request."""
        script = self.scripts.setdefault(transfer_id, asyncio.Queue())
        for event in events:
            script.put_nowait(event)

    async def start(self) -> None:
        """There is nothing to load."""

    async def prefill(
        self,
        work: PrefillWork,
        on_first_token: Callable[[DecodeTokens], None] | None = None,
        on_report: Callable[[SendReport], None] | None = None,
    ) -> PrefillOutcome:
        raise AssertionError("a decode engine must not prefill")

    async def decode(self, work: DecodeWork, sink: AnswerSink) -> None:
        self.works.append(work)
        script = self.scripts.get(work.transfer_id, self.script)
        has_tokens = False
        try:
            while True:
                event = await script.get()
                if event is None:
                    return
                if isinstance(event, Exception):
                    raise event
                if has_tokens and isinstance(event, DecodeTokens):
                    sink.add_tokens(event.token_ids)
                else:
                    has_tokens = isinstance(event, DecodeTokens)
                    sink.put(event)
        finally:
            self.closed += 1

    def transfer_event(self, event: TransferEvent) -> None:
        match event:
            case Arrived(transfer_id):
                self.arrived_ids.append(transfer_id)
            case FirstToken(transfer_id, token_id):
                self.first_tokens.append((transfer_id, token_id))
            case FirstHiddenState(transfer_id, state):
                self.first_hidden_state_given.append((transfer_id, state))
            case Released(transfer_id):
                self.released_ids.append(transfer_id)
            case Recompute():
                raise AssertionError("a decode engine fetches no prefix")

    def usage(self) -> EngineUsage:
        return EngineUsage(len(self.works) - self.closed, 0)

    async def close(self) -> None:
        """There is nothing to end."""

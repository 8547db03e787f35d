"""Turns of agents' conversations: CPU of a router, the first token and hits, beside Dynamo's frontend and vllm-router.

    python -m bench.agents [--rounds 5] [--turns 4] [--together 16] [--model FOLDER] [--output DIR]
        [--dynamo PYTHON] [--vllm-router PATH]

Each conversation goes over OpenAI HTTP to simulated workers, with the tokenizer of --model. A turn sends the whole
conversation, with the last answer and a new question of some 500 tokens. Answers have 64 tokens, 5 ms apart. Chats of
400 tokens have no history. A conversation makes --turns turns in each round, after one that fills the caches. Alone,
it pauses for 0.2 s after a turn. Then --together conversations run at once, with pauses of 0.5 to 3 s. Half of them
have 64K tokens of history, the others 128K. The servers take turns within each round. CPU is that of the
router's process, pauses included. Hits are the cached share of the prompt and the answer of the turn before.

PYTHON has Dynamo 1.6.1 (see `bench.proxy.dynamo`). Its mockers and our workers have as much KV memory. vllm-router's
mock workers keep no KV. Without these options, only our router is measured. `python -m bench.agents.engines` is the
small form with real engines.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx
import uvloop

from bench.agents.conversations import Conversation, Words
from bench.agents.sides import DYNAMO, Side, dynamo, headrace, vllm_router
from bench.support.page_parts import check_page, write_parts
from bench.support.processes import cpu_seconds

CHAT: Final = "chat"
HISTORY_TOKENS: Final = (0, 64_000, 128_000)
_LIMIT_S: Final = 60.0
_PAUSE_S: Final = 0.2
_PAUSES_TOGETHER_S: Final = (0.5, 3.0)


@dataclass(slots=True)
class Cell:
    """Conversations that one server answers at the same time. `cpu_ms`: of a turn, by round."""

    side: Side
    name: str
    conversations: list[Conversation]
    cpu_ms: list[float] = field(default_factory=list)

    async def run(self, client: httpx.AsyncClient, turns: int) -> None:
        """A round."""
        begin_s = cpu_seconds(self.side.pid)
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(self.conversations):
                group.create_task(self._converse(client, one, turns, random.Random(number)))
        cpu_s = cpu_seconds(self.side.pid) - begin_s
        self.cpu_ms.append(1e3 * cpu_s / turns / len(self.conversations))

    async def _converse(
        self, client: httpx.AsyncClient, one: Conversation, turns: int, pauses: random.Random
    ) -> None:
        together = len(self.conversations) > 1
        for _ in range(turns):
            await asyncio.sleep(pauses.uniform(*_PAUSES_TOGETHER_S) if together else _PAUSE_S)
            await one.ask(client, self.side.wanted)

    async def fill(self, client: httpx.AsyncClient) -> None:
        """A turn of each, one by one, that is not measured."""
        for one in self.conversations:
            await one.ask(client, self.side.wanted)
            one.turns.clear()

    def ratio(self, other: Cell | None) -> str:
        """Of the CPU to the other's, the median of the rounds."""
        if other is None:
            return ""
        pairs = zip(self.cpu_ms, other.cpu_ms, strict=True)
        return f"{statistics.median(one / two for one, two in pairs):.2f}"

    def row(self, chat: Cell, dynamo: Cell | None) -> str:
        """Of the table. `chat`: of the same server. `dynamo`: the same of Dynamo's frontend."""
        turns = [turn for one in self.conversations for turn in one.turns]
        prompt_tokens = statistics.median(turn.prompt_tokens for turn in turns)
        reusable = sum(turn.reusable_tokens for turn in turns)
        cached = sum(min(turn.cached_tokens, turn.reusable_tokens) for turn in turns)
        router_ms = statistics.median(turn.router_ms for turn in turns)
        cells = (
            *(self.side.name, self.name, f"{prompt_tokens:,.0f}" if prompt_tokens else ""),
            *(f"{statistics.median(self.cpu_ms):.1f}", self.ratio(chat), self.ratio(dynamo)),
            f"{router_ms:.1f}" if router_ms else "",
            f"{statistics.median(turn.first_ms for turn in turns):.0f}",
            f"{100 * cached / reusable:.1f}" if reusable else "",
        )
        return f"| {' | '.join(cells)} |"


def cells_of(side: Side, together: int) -> list[Cell]:
    """Of one server. All servers get the same texts."""
    seeds = iter(range(7, 1_000))

    def conversation(tokens: int) -> Conversation:
        words = Words(next(seeds))
        return Conversation(words, words.history(tokens))

    cells = [
        Cell(side, f"{tokens // 1000}K, alone" if tokens else CHAT, [conversation(tokens)])
        for tokens in HISTORY_TOKENS
    ]
    if together:
        histories = [HISTORY_TOKENS[1 + number % 2] for number in range(together)]
        cells.append(Cell(side, f"{together} at once", [conversation(one) for one in histories]))
    return cells


async def measure(arguments: argparse.Namespace, folder: Path) -> list[Cell]:
    """All rounds of all servers."""
    async with AsyncExitStack() as stack:
        sides = [await headrace(stack, folder, arguments.model)]
        if arguments.dynamo:
            sides.append(await dynamo(stack, folder, arguments.model, arguments.dynamo))
        if arguments.vllm_router:
            sides.append(await vllm_router(stack, folder, arguments.vllm_router))
        found: list[tuple[httpx.AsyncClient, list[Cell]]] = []
        for side in sides:
            client = httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{side.port}",
                timeout=_LIMIT_S,
                headers={"content-type": "application/json"},
            )
            await stack.enter_async_context(client)
            found.append((client, cells_of(side, arguments.together)))
            for cell in found[-1][1]:
                await cell.fill(client)
        for number in range(arguments.rounds):
            for client, cells in found if number % 2 else found[::-1]:
                for cell in cells:
                    await cell.run(client, arguments.turns)
        return [cell for _, cells in found for cell in cells]


def table(found: list[Cell]) -> str:
    """A row for each cell of each server."""
    cells = {(cell.side.name, cell.name): cell for cell in found}
    return "\n".join(
        (
            _HEAD,
            "|---" * (_HEAD.count("|") - 1) + "|",
            *(
                cell.row(cells[cell.side.name, CHAT], cells.get((DYNAMO, cell.name)))
                for cell in found
            ),
        )
    )


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    page = Path(arguments.output) / "agents.md" if arguments.output else None
    arguments.vllm_router = shutil.which(arguments.vllm_router)
    if page is not None:
        check_page(page, ["turns"])
    with TemporaryDirectory() as folder:
        text = table(await measure(arguments, Path(folder)))
    print(text)
    if page is not None:
        write_parts(page, {"turns": text}, _NOTES)


_HEAD: Final = (
    "| server | conversations | prompt tokens | CPU a turn, ms | of its chat's | of Dynamo's "
    "| first token in the router, ms | first token at the client, ms | hits, % |"
)
_NOTES: Final = """# Turns of agents

Made by `python -m bench.agents`: what it does is in its docstring. Medians of the rounds; ratios are of the same round.
The workers' part of the first token grows with the history too: simulated engines hash and compare it in Python.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--dynamo", default="", help="a Python with Dynamo 1.6.1")
    parser.add_argument("--vllm-router", default="")
    parser.add_argument("--output", default="")
    uvloop.run(main(parser.parse_args()))

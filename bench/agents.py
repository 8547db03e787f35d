"""CPU of a router and its share of the first token, in turns of conversations with a long history.

    python -m bench.agents [--rounds 15] [--model FOLDER] [--output DIR]

Each conversation goes through the router's OpenAI HTTP to simulated workers, with the tokenizer of --model. A turn
sends the whole conversation, with the last answer and a new question of some 500 tokens. The conversations take turns,
beside chats of 400 tokens that have no history. CPU is that of the router's process until 0.2 s after the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import uvloop

from bench.support.page_parts import check_page, write_parts
from bench.support.processes import cpu_seconds
from bench.support.services import Services, until_listed
from headrace_common.process.free_port import free_port

HISTORY_TOKENS: Final = (0, 64_000, 128_000)
_SIM: Final = "sim:vocabulary=49152,context=262144,verify=off,decode_step_s=0.005"
_PATH: Final = "/v1/chat/completions"
_LIMIT_S: Final = 60.0
_PAUSE_S: Final = 0.2
_ANSWER_TOKENS: Final = 20
# Random words have some 3.4 tokens.
_TOKENS_PER_WORD: Final = 3.4
_MESSAGE_WORDS: Final = 750
_QUESTION_WORDS: Final = 150
_CHAT_WORDS: Final = 115
_ROUTER_PARTS: Final = ("admission", "tokenize", "route")

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    cpu_ms: float
    """Of the router."""
    first_ms: float
    """From the request to the first token, at the client."""
    router_ms: float
    """The part of it in which the router admits, tokenizes and places the request."""
    prompt_tokens: int
    body_bytes: int
    answer: str


@dataclass(slots=True)
class Conversation:
    """A conversation, and its turns. Without a history, each turn is a chat of its own."""

    messages: Messages
    turns: list[Turn] = field(default_factory=list)

    def median(self, name: str) -> float:
        """The median of one value of the turns."""
        return float(statistics.median(getattr(turn, name) for turn in self.turns))


class Words:
    """Texts of words that are not in the tokenizer's vocabulary."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._words = [
            "".join(self._random.choices("aeiourstlnmdpc", k=self._random.randint(3, 9)))
            for _ in range(4_000)
        ]

    def text(self, count: int) -> str:
        """So many words."""
        return " ".join(self._random.choices(self._words, k=count))

    def history(self, tokens: int) -> Messages:
        """A conversation of about so many tokens, up to the first question. Empty for none."""
        left = round(tokens / _TOKENS_PER_WORD)
        messages: Messages = []
        while left > 0:
            role = ("user", "assistant")[len(messages) % 2]
            messages.append({"role": role, "content": self.text(min(left, _MESSAGE_WORDS))})
            left -= _MESSAGE_WORDS
        return messages


@asynccontextmanager
async def deployed(folder: Path, model: str) -> AsyncIterator[tuple[str, int]]:
    """A registry, a router, a prefill and a decode worker: the address of the router's HTTP, and its process id."""
    door = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        services = Services(stack, folder)
        _, here = await services.start_registry()
        router, endpoint = await services.start_router(
            f"--registry={here}", f"--model=sim={model}", f"--http-listen={door}"
        )
        for service in ("prefill", "decode"):
            await services.start(
                *(service, f"--worker-id={service}", f"--registry={here}", "--engine=sim"),
                *(f"--model={_SIM}", "--served-model=sim", "--internal-listen=127.0.0.1:0"),
                *("--num-gpu-blocks-override=65536", "--max-num-batched-tokens=16384"),
            )
        await until_listed(endpoint, 1, 1, _LIMIT_S)
        yield f"http://{door}", router.pid


async def run_turn(client: httpx.AsyncClient, pid: int, messages: Messages) -> Turn:
    """Sends a conversation, and reads the answer to its end."""
    wanted: dict[str, Any] = {
        "model": "sim",
        "messages": messages,
        "max_tokens": _ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_latency": True,
    }
    body = json.dumps(wanted).encode()
    begin_cpu_s, begin_s = cpu_seconds(pid), time.perf_counter()
    first_s, text = 0.0, ""
    latency: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    async with client.stream("POST", _PATH, content=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                latency = choice.get("latency") or latency
                first_s = first_s or time.perf_counter() - begin_s
                text += choice["delta"].get("content") or ""
    await asyncio.sleep(_PAUSE_S)
    parts = latency["first_token"]["parts_us"]
    return Turn(
        cpu_ms=1e3 * (cpu_seconds(pid) - begin_cpu_s),
        first_ms=1e3 * first_s,
        router_ms=1e-3 * sum(parts.get(name, 0) for name in _ROUTER_PARTS),
        prompt_tokens=usage["prompt_tokens"],
        body_bytes=len(body),
        answer=text,
    )


async def measure(arguments: argparse.Namespace, folder: Path) -> list[Conversation]:
    """All rounds, after one that fills the caches."""
    words = Words(seed=7)
    found = [Conversation(words.history(tokens)) for tokens in HISTORY_TOKENS]
    async with (
        deployed(folder, arguments.model) as (address, pid),
        httpx.AsyncClient(
            base_url=address, timeout=_LIMIT_S, headers={"content-type": "application/json"}
        ) as client,
    ):
        for number in range(arguments.rounds + 1):
            for one in found:
                count = _QUESTION_WORDS if one.messages else _CHAT_WORDS
                question = {"role": "user", "content": words.text(count)}
                turn = await run_turn(client, pid, [*one.messages, question])
                if one.messages:
                    one.messages += [question, {"role": "assistant", "content": turn.answer}]
                if number:
                    one.turns.append(turn)
    return found


def table(found: list[Conversation]) -> str:
    """A row for each conversation."""
    lines = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for one in found:
        pairs = zip(one.turns, found[0].turns, strict=True)
        ratio = statistics.median(turn.cpu_ms / short.cpu_ms for turn, short in pairs)
        cells = (
            f"{one.median('prompt_tokens'):,.0f}",
            f"{one.median('body_bytes') / 1024:.0f}",
            f"{one.median('cpu_ms'):.1f}",
            f"{ratio:.2f}",
            f"{one.median('router_ms'):.1f}",
            f"{one.median('first_ms'):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


async def main(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes the table."""
    page = Path(arguments.output) / "agents.md" if arguments.output else None
    if page is not None:
        check_page(page, ["turns"])
    with TemporaryDirectory() as folder:
        text = table(await measure(arguments, Path(folder)))
    print(text)
    if page is not None:
        write_parts(page, {"turns": text}, _NOTES)


_HEAD: Final = (
    "| prompt tokens | body, KiB | router CPU, ms | of a chat's | first token in the router, ms "
    "| first token at the client, ms |"
)
_NOTES: Final = """# Turns of agents

Made by `python -m bench.agents`: what it does is in its docstring. Medians of the rounds; ratios are of the same round.
The workers' part of the first token grows with the history too: simulated engines hash and compare it in Python.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--output", default="")
    uvloop.run(main(parser.parse_args()))

"""`headrace chat`: one prompt, or a conversation."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from headrace.inference.v1 import inference_pb2
from headrace_cli.client import RouterClient, chat_request, open_router
from headrace_cli.console import notice_console
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import InternalError

EXIT_WORDS = ("/exit", "/quit")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to ask."""

    model: str = ""
    max_tokens: int = 0
    temperature: float | None = None
    seed: int | None = None
    system: str = ""
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, whole."""

    text: str
    trace_id: str
    last: inference_pb2.GenerateResponse


async def ask(
    router: RouterClient, messages: list[tuple[str, str]], options: ChatOptions
) -> Answer:
    """Asks, and writes the answer to stdout as it comes."""
    request = chat_request(
        messages,
        model=options.model,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    text: list[str] = []
    trace_id = ""
    last = inference_pb2.GenerateResponse()
    async for response in router.generate(request, options.timeout_s):
        trace_id = trace_id or response.trace_id
        text.append(response.text)
        sys.stdout.write(response.text)
        sys.stdout.flush()
        last = response
    sys.stdout.write("\n")
    sys.stdout.flush()
    if not last.finish_reason:
        raise InternalError("the answer ended without saying why")
    return Answer("".join(text), trace_id, last)


async def chat_once(router: RouterClient, prompt: str, options: ChatOptions) -> Answer:
    """One prompt, one answer."""
    return await ask(router, [*_opening(options), ("user", prompt)], options)


def converse(endpoint: str, options: ChatOptions) -> None:
    """A conversation that remembers, until the input ends. Ctrl-C cuts an answer short, or ends.

    The loop runs only while an answer comes, so that Ctrl-C reaches whatever waits for a line.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        notice_console().print("Type a message; /exit or Ctrl-D ends.", style="dim")
    messages = _opening(options)
    with asyncio.Runner() as runner:
        while (line := _read_line(interactive)) is not None and line.strip() not in EXIT_WORDS:
            if not line.strip():
                continue
            messages.append(("user", line))
            try:
                answer = runner.run(_ask_once(endpoint, messages, options))
            except KeyboardInterrupt:
                if not interactive:
                    raise
                messages.pop()
                sys.stdout.write("\n")
            else:
                messages.append(("assistant", answer.text))


async def _ask_once(endpoint: str, messages: list[tuple[str, str]], options: ChatOptions) -> Answer:
    async with open_router(endpoint) as router:
        return await ask(router, messages, options)


def summary(answer: Answer) -> str:
    """Counts and times in one line."""
    usage, timing = answer.last.usage, answer.last.timing
    first_ms = 1e3 * seconds_from_duration(timing.time_to_first_token)
    total_s = seconds_from_duration(timing.total)
    path = timing.decode_worker_id
    if timing.prefill_worker_id:
        path = f"{timing.prefill_worker_id} -> {timing.decode_worker_id}"
    return (
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens, first after {first_ms:.0f} ms, "
        f"all after {total_s:.1f} s, {path}; {usage.transferred_tokens} tokens' KV transferred"
    )


def _opening(options: ChatOptions) -> list[tuple[str, str]]:
    return [("system", options.system)] if options.system else []


def _read_line(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "")
    except EOFError:
        return None

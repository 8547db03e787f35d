"""`headrace chat`: one prompt, or a conversation."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from headrace.inference.v1 import inference_pb2
from headrace_cli.client import WAIT_S, RouterClient, Wait, open_router
from headrace_cli.options import (
    DEFAULT_ROUTER,
    AddressedCommand,
    MaxTokens,
    RequestModel,
    Router,
    SystemMessage,
)
from headrace_cli.output import (
    Json,
    command,
    message_object,
    notice_console,
    option,
    print_json,
)
from headrace_client import build_request
from headrace_common.durations import seconds_from_duration
from headrace_common.errors import ConfigError, InternalError

EXIT_WORDS = ("/exit", "/quit")

Temperature = Annotated[
    float | None, option("Randomness; 0 is greedy.", min=0, max=2, show_default="1")
]
Seed = Annotated[int | None, option("Makes sampling repeatable.", min=0)]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of the requests of one command."""

    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    system: str = ""
    timeout_s: float = 300.0


@command(
    "chat",
    "headrace chat   |   headrace chat 'Why is the sky blue?' --max-tokens 80   |   echo Hello | headrace chat",
    cls=AddressedCommand,
)
def chat(
    prompt: Annotated[
        str,
        typer.Argument(
            help="Prompt to run; without it, the piped text, or on a terminal a conversation."
        ),
    ] = "",
    router: Router = DEFAULT_ROUTER,
    model: RequestModel = "",
    system: SystemMessage = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    timeout: Annotated[float, option("Seconds that an answer may take.", min=0.1)] = 300,
    wait: Wait = WAIT_S,
    as_json: Json = False,
) -> None:
    """Runs one prompt, or on a terminal a conversation."""
    options = ChatOptions(model, max_tokens, temperature, seed, system, timeout)

    if not prompt and sys.stdin.isatty():
        if as_json:
            raise ConfigError("--json answers one prompt: give PROMPT, or pipe one")
        converse(router, options)
        return
    asyncio.run(_answer_once(router, prompt or read_piped(), options, as_json=as_json))


async def _answer_once(router: str, question: str, options: ChatOptions, *, as_json: bool) -> None:
    async with open_router(router) as client:
        answer = await chat_once(client, question, options, show=not as_json)
        if as_json:
            print_json(message_object(answer))
            return
        if sys.stderr.isatty():
            notice_console().print(summary(answer), style="dim")


async def ask(
    router: RouterClient,
    messages: list[tuple[str, str]],
    options: ChatOptions,
    *,
    show: bool = True,
) -> inference_pb2.GenerateResponse:
    """The last response to a conversation, with the whole text. With `show`, writes it to stdout as it arrives.

    Raises InternalError when the answer ends without a finish reason.
    """
    request = build_request(
        messages=messages,
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
        if show:
            sys.stdout.write(response.text)
            sys.stdout.flush()
        last = response
    if show:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if not last.finish_reason:
        raise InternalError("the answer ended without a finish reason")
    last.text, last.trace_id = "".join(text), trace_id
    return last


async def chat_once(
    router: RouterClient, prompt: str, options: ChatOptions, *, show: bool = True
) -> inference_pb2.GenerateResponse:
    """Runs one prompt."""
    return await ask(router, [*_opening(options), ("user", prompt)], options, show=show)


def converse(endpoint: str, options: ChatOptions) -> None:
    """Runs a conversation until the input ends.

    Ctrl-C cancels the current answer; without one, it ends the conversation. The event loop runs only
    during an answer, so that Ctrl-C interrupts the wait for a line too.
    """
    notice_console().print("Type a message; /exit or Ctrl-D ends.", style="dim")
    messages = _opening(options)
    with asyncio.Runner() as runner:
        while (line := _read_line()) is not None and line.strip() not in EXIT_WORDS:
            if not line.strip():
                continue
            messages.append(("user", line))
            try:
                answer = runner.run(_ask_once(endpoint, messages, options))
            except KeyboardInterrupt:
                messages.pop()
                sys.stdout.write("\n")
            else:
                messages.append(("assistant", answer.text))


async def _ask_once(
    endpoint: str, messages: list[tuple[str, str]], options: ChatOptions
) -> inference_pb2.GenerateResponse:
    async with open_router(endpoint) as router:
        return await ask(router, messages, options)


def summary(answer: inference_pb2.GenerateResponse) -> str:
    """The counts and times of an answer in one line."""
    usage, timing = answer.usage, answer.timing
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


def read_piped() -> str:
    """The whole text of stdin, as one question. Raises ConfigError where it is blank or no UTF-8."""
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the piped text is not UTF-8 at byte {error.start}: convert it, such as with `iconv -t UTF-8`"
        ) from error
    if not text.strip():
        raise ConfigError("no question: give PROMPT, or pipe a text")
    return text.removesuffix("\n")


def _read_line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None

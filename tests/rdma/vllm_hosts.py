"""A vLLM prefill worker on one machine and a vLLM decode worker on another, with the KV over RDMA.

The machines read vLLM and the model from folders of the host. Emulated processors have AVX2 and no AVX-512, so vLLM
uses other kernels than on the host. The tokens are therefore compared with those of the same engine alone: the decode
worker computes the prompts itself, after its prefix cache is emptied.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

from headrace.inference.v1 import inference_pb2, sampling_pb2
from tests.forked import Forked, fork
from tests.rdma.cases import VLLM_MOVED, VLLM_SENT, VLLM_TOKENS
from tests.rdma.device import check_crossed_by_rdma, traffic
from tests.rdma.hosts import FIRST_HOST, SECOND_HOST, accepted, listening, meet
from tests.rdma.processes import start_program, stop, wait_serving
from tests.rdma.report import Result, note_of, run_case, show_logs, write_failure, write_result
from tests.rdma.serving import Site, center, check_engines
from tests.waiting import until

MODEL = Path("/host/model")
NAME = "tiny-llama"
PREFILL, DECODE = "prefill-vllm", "decode-vllm"
PROMPTS = 3
PROMPT_TOKENS = 600
ANSWER_TOKENS = 8
ASKED_MAX = 8
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
LOCAL = inference_pb2.PREFILL_PLACEMENT_LOCAL
BLOCK_TOKENS = 32
# 4 layers, keys and values of 4 heads, 32 channels in float32.
TOKEN_BYTES = 4 * 2 * 4 * 32 * 4
# An emulated machine imports vLLM in 2 minutes when nothing else runs.
START_TIMEOUT_S = 1800.0
ANSWER_TIMEOUT_S = 300.0
_CLIENT_TIMEOUT_S = 2400.0
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def start_worker(role: str, site: Site) -> Forked:
    """The worker of this machine."""
    os.environ.update({**_ENVIRONMENT, "VLLM_HOST_IP": site.here})
    flags: dict[str, object] = {
        "internal-listen": f"{site.here}:0",
        "registry": site.registry,
        "worker-id": PREFILL if role == "prefill" else DECODE,
        "model": MODEL,
        "served-model": NAME,
        "dtype": "float32",
        "block-size": BLOCK_TOKENS,
        "num-gpu-blocks-override": 128,
        "max-num-seqs": 4,
        # Emulated heartbeats are late.
        "lease-ttl-s": 60,
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    return start_program(role, PREFILL if role == "prefill" else DECODE, words)


def decode_host() -> None:
    """Registry, router and decode worker. Reports the answers."""
    site = Site(FIRST_HOST, FIRST_HOST)
    with listening() as server, center(site, f"{NAME}=sim"):
        worker = start_worker("decode", site)
        try:
            with accepted(server, START_TIMEOUT_S) as line:
                wait_serving([worker], START_TIMEOUT_S)
                assert line.readline().strip() == "serves", "the second host is gone"
                # A process that uses gRPC must not fork.
                client = fork("client", partial(ask_and_report, site))
                client.wait(_CLIENT_TIMEOUT_S)
                print("answered", file=line, flush=True)
                line.readline()
            stop([worker])
        except (AssertionError, TimeoutError) as error:
            show_logs("*.log")
            write_failure(VLLM_MOVED, note_of(error))
        finally:
            worker.kill()


def prefill_host() -> None:
    """The prefill worker, until the first host has its answers."""
    site = Site(FIRST_HOST, SECOND_HOST)
    with meet(_CLIENT_TIMEOUT_S) as line:
        worker = start_worker("prefill", site)

        def serve() -> str:
            wait_serving([worker], START_TIMEOUT_S)
            before = traffic()
            print("serves", file=line, flush=True)
            assert line.readline().strip() == "answered", "the first host is gone"
            check_engines(PREFILL)
            return check_crossed_by_rdma(traffic() - before, payload_bytes(), sends=True)

        run_case(VLLM_SENT, serve)
        show_logs(f"{PREFILL}.log")
        print("ended", file=line, flush=True)
        worker.kill()


def payload_bytes() -> int:
    """Bytes of the KV of all prompts."""
    return PROMPTS * PROMPT_TOKENS * TOKEN_BYTES


def ask_and_report(site: Site) -> None:
    """Asks with remote prefills and with local ones, and compares."""
    started_s = time.monotonic()
    try:
        moved, remote, local = asyncio.run(_ask_all(site))
        check_engines(DECODE)
    # Any exception is the result.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        show_logs("*.log")
        write_result(Result(VLLM_MOVED, False, time.monotonic() - started_s, note_of(error)))
        return
    duration_s = time.monotonic() - started_s
    write_result(Result(VLLM_MOVED, True, duration_s, moved))
    equal = sum(one == other for one, other in zip(remote, local, strict=True))
    note = f"{equal} of {len(local)} answers of {ANSWER_TOKENS} tokens are equal"
    write_result(Result(VLLM_TOKENS, remote == local, duration_s, note))


async def _ask_all(site: Site) -> tuple[str, list[list[int]], list[list[int]]]:
    """The proof of RDMA, and the answers with remote and with local prefills."""
    # Starts gRPC's threads, so only after the forks.
    from headrace_cli.client import list_members, open_router, reset_prefix_cache

    async with open_router(site.router) as router:

        async def joined() -> bool:
            found = (await router.listing()).models
            return any((m.prefill_worker_count, m.decode_worker_count) == (1, 1) for m in found)

        await until(joined, ANSWER_TIMEOUT_S, "both workers have joined", interval_s=0.5)
        before = traffic()
        prompts, remote = await _ask_remotely(router)
        moved = check_crossed_by_rdma(traffic() - before, payload_bytes(), sends=False)
        members = await list_members(site.registry)
        decode = next(one.endpoint for one in members if one.worker_id == DECODE)
        await reset_prefix_cache(decode, ANSWER_TIMEOUT_S)
        local = [(await _ask(router, prompt, LOCAL))[0] for prompt in prompts]
    return moved, remote, local


async def _ask_remotely(router: Any) -> tuple[list[list[int]], list[list[int]]]:
    """PROMPTS prompts that prefill has computed, and their answers.

    An emulated machine can be so late that the router falls back to a local prefill. Then it asks another prompt.
    """
    numbers = random.Random(7)
    prompts: list[list[int]] = []
    answers: list[list[int]] = []
    for _ in range(ASKED_MAX):
        prompt = [numbers.randrange(3, 500) for _ in range(PROMPT_TOKENS)]
        tokens, transferred_tokens = await _ask(router, prompt, REMOTE)
        if transferred_tokens == PROMPT_TOKENS:
            prompts.append(prompt)
            answers.append(tokens)
        if len(prompts) == PROMPTS:
            return prompts, answers
    raise AssertionError(f"only {len(prompts)} of {ASKED_MAX} prompts were prefilled remotely")


async def _ask(
    router: Any, prompt: list[int], placement: inference_pb2.PrefillPlacement.ValueType
) -> tuple[list[int], int]:
    """The tokens of a greedy answer, and how many tokens were transferred for it."""
    request = inference_pb2.GenerateRequest(
        model=NAME,
        tokens=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(
            temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True
        ),
        prefill_placement=placement,
    )
    tokens: list[int] = []
    last = inference_pb2.GenerateResponse()
    async for response in router.generate(request, ANSWER_TIMEOUT_S):
        tokens += response.token_ids
        last = response
    assert last.usage.decode_cached_tokens == 0, "the prompt was cached"
    return tokens, last.usage.transferred_tokens

"""Running answers of real engines move between workers. Each equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from headrace.inference.v1 import image_pb2, inference_pb2, inference_pb2_grpc, sampling_pb2
from headrace_cli.commands.workers import drain_worker, move_answer
from headrace_cli.up.supervisor import Spawn
from headrace_common.errors import Conflict, InvalidRequest, NoDecodeWorker, WorkerGone
from headrace_common.rpc.status import error_from_rpc
from tests.fork_server import TORCHVISION, TORCHVISION_PATH
from tests.freezing import freeze
from tests.suite.deployment import Suite, all_begun, greedy, suite
from tests.vllm import adapters
from tests.vllm.conftest import on_services
from tests.vllm.image_prompts import SMALL
from tests.vllm.mended import mended
from tests.vllm.pair import DRAFTS, STEPS_AHEAD
from tests.vllm.test_both_roles import with_two_ranks
from tests.vllm.test_services import LOCAL, REMOTE, SEEDED, prompt_of

TOKENS = 1_700
PROMPT_TOKENS = 150
GRAMMAR = 'root ::= ([a-f]+ "-" [0-9]+ " ")* "END"'
pytestmark = on_services(Path("models/tiny-gemma3"))


@dataclass(slots=True)
class Answer:
    """The choices of a request."""

    token_ids: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    last: dict[int, inference_pb2.GenerateResponse] = field(default_factory=dict)

    def check(self, plain: Answer, attempts: int = 1) -> None:
        assert self.token_ids == plain.token_ids
        for choice, logprobs in plain.logprobs.items():
            assert self.logprobs[choice] == pytest.approx(logprobs, abs=1e-3)
        for choice, last in plain.last.items():
            assert self.last[choice].finish_reason == last.finish_reason
            assert self.last[choice].timing.attempts <= attempts


async def ask(
    it: Suite, request: inference_pb2.GenerateRequest, begun: asyncio.Event | None = None
) -> Answer:
    """Sets `begun` when each choice has some tokens."""
    answer, stub = Answer(), inference_pb2_grpc.InferenceServiceStub(it.channel)
    try:
        async for one in stub.Generate(request, timeout=200):
            answer.token_ids[one.choice] += one.token_ids
            answer.logprobs[one.choice] += [entry.logprob for entry in one.logprobs]
            answer.last[one.choice] = one
            counts = [len(tokens) for tokens in answer.token_ids.values()]
            if begun is not None and len(counts) == max(request.n, 1) and min(counts) > 8:
                begun.set()
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    return answer


async def begin(
    it: Suite, requests: Sequence[inference_pb2.GenerateRequest]
) -> list[asyncio.Task[Answer]]:
    """Their ids are r0, r1 and so on."""
    for number, one in enumerate(requests):
        one.request_id = f"r{number}"
        # Else the target would have the KV of the undisturbed run.
        one.cache_salt = "moved"
    begun = [asyncio.Event() for _ in requests]
    tasks = [
        asyncio.create_task(ask(it, one, event)) for one, event in zip(requests, begun, strict=True)
    ]
    await all_begun(tasks, begun, 60.0)
    return tasks


def request_of(number: int, count: int = TOKENS, placement: Any = LOCAL, **sampling: Any) -> Any:
    sampling = {"logprobs": 1, **sampling}
    return greedy(prompt_of(PROMPT_TOKENS + number, number), count, placement, **sampling)


def usual(count: int = TOKENS) -> list[inference_pb2.GenerateRequest]:
    """Greedy and seeded, computed there and elsewhere."""
    return [request_of(1, count), request_of(2, count, REMOTE, **SEEDED)]


def of_every_kind() -> list[inference_pb2.GenerateRequest]:
    outputs = sampling_pb2.StructuredOutputs(grammar=GRAMMAR)
    grammar = request_of(3, ignore_eos=False, structured_outputs=outputs, **SEEDED)
    choices = request_of(4, 1_000, **SEEDED)
    choices.n = 2
    poet = request_of(5, 1_000)
    poet.adapter = "poet"
    return [*usual(), grammar, choices, poet]


def only_greedy() -> list[inference_pb2.GenerateRequest]:
    """On processors, vLLM divides the logits of drafts by temperatures that it never wrote, unless all are greedy."""
    return [request_of(1), request_of(2, placement=REMOTE)]


def with_image() -> list[inference_pb2.GenerateRequest]:
    parts = [
        image_pb2.ContentPart(image=image_pb2.Image(data=SMALL.data)),
        image_pb2.ContentPart(text="What is in it? " * 8),
    ]
    asked = usual(1_000)
    for one in asked:
        one.ClearField("tokens")
        one.chat.messages.add(role="user", parts=parts)
    return asked


@dataclass(frozen=True, slots=True)
class Variant:
    """`sends`: the source sends KV. Else the target computes it."""

    model: str
    engine_args: str = ""
    requests: Callable[[], list[inference_pb2.GenerateRequest]] = usual
    spawning: Callable[[Spawn], Spawn] = mended
    sends: bool = True


VARIANTS = {
    "every kind": Variant("tiny-llama", adapters.ARGUMENTS, of_every_kind),
    "steps ahead": Variant("tiny-llama", STEPS_AHEAD),
    "windows": Variant("tiny-gemma3"),
    "ranks": Variant("tiny-llama", requests=lambda: usual(1_200), spawning=with_two_ranks),
    "drafts": Variant("tiny-llama", DRAFTS, only_greedy),
    "images": Variant("tiny-llava", requests=with_image),
    # On processors, vLLM caches no prefixes of latent attention.
    "latent": Variant("tiny-deepseek-v3", requests=lambda: usual(1_000), sends=False),
}


@pytest.mark.parametrize("name", VARIANTS)
async def test_answers_move_there_and_back(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = VARIANTS[name]
    if name == "images":
        if TORCHVISION_PATH and not TORCHVISION.is_dir():
            pytest.skip("torchvision is missing: make test-vllm fetches it")
        monkeypatch.setenv("PYTHONPATH", ":".join(TORCHVISION_PATH))
    options = workers(variant.model, variant.engine_args)
    async with suite(tmp_path, spawning=variant.spawning, **options) as it:
        asked = variant.requests()
        plain = [await ask(it, one) for one in asked]
        running = await begin(it, asked)
        moves: list[inference_pb2.AnswerMove] = []
        for _ in range(2):
            for one in asked:
                moves += (await move_answer(it.deployment.registry, one.request_id, "")).moves
        for answer, undisturbed in zip(await asyncio.gather(*running), plain, strict=True):
            answer.check(undisturbed)
        assert {move.source_worker_id for move in moves} == {"worker-0", "worker-1"}
        assert any(move.payload_bytes for move in moves) == variant.sends
        for worker in ("worker-0", "worker-1"):
            await it.wait_empty(worker, timeout_s=20)


async def test_an_answer_with_states_stays_and_is_computed_again(tmp_path: Path) -> None:
    async with suite(tmp_path, spawning=mended, **workers("tiny-lfm2")) as it:
        asked = usual(400)
        plain = [await ask(it, one) for one in asked]
        running = await begin(it, asked)
        for one in asked:
            with pytest.raises(InvalidRequest, match="has states"):
                await move_answer(it.deployment.registry, one.request_id, "")
        victim, survivor = await it.busier("worker-0", "worker-1")
        await drain_worker(it.deployment.registry, victim, 0.5, wait=True, console=None)
        answers = await asyncio.gather(*running)
        for answer, undisturbed in zip(answers, plain, strict=True):
            answer.check(undisturbed, attempts=2)
            assert answer.last[0].timing.decode_worker_id == survivor
        for answer in answers:
            receipt, timing = answer.last[0].usage.receipt, answer.last[0].timing
            again = timing.attempts - 1
            assert (receipt.moves, bool(receipt.recomputed_tokens)) == (again, bool(again))


@pytest.mark.core
def test_the_page_has_the_variants() -> None:
    page = Path("docs/architecture/moves.md").read_text()
    table = page.partition("| variant |")[2].partition("\n\n")[0]
    rows = [tuple(cell.strip() for cell in row.split("|")[1:3]) for row in table.splitlines()[2:]]
    ways = {True: "moves with its KV", False: "moves, computed by the target"}
    moved = [(name, ways[variant.sends]) for name, variant in VARIANTS.items()]
    assert rows == [*moved, ("states", "stays, and is replayed")]


async def test_a_killed_target_and_a_killed_source_end_no_answer(tmp_path: Path) -> None:
    async with suite(tmp_path, **workers("tiny-llama", count=3)) as it:
        asked = usual()
        plain = [await ask(it, one) for one in asked]
        running = await begin(it, asked)

        def move(request_id: str, worker_id: str) -> asyncio.Task[Any]:
            return asyncio.create_task(move_answer(it.deployment.registry, request_id, worker_id))

        for one in asked:
            with suppress(NoDecodeWorker):
                await move(one.request_id, "worker-0")
        # The source does not send, so the target waits for its KV.
        with it.frozen("worker-0"):
            moving = move("r0", "worker-1")
            await it.until("worker-1", lambda status: status.active_transfers > 0)
            it.kill("worker-1")
        with pytest.raises(WorkerGone):
            await moving
        freeze(it.child("worker-0").process.pid)
        moving = move("r1", "worker-2")
        await it.until("worker-2", lambda status: status.active_transfers > 0)
        it.kill("worker-0")
        with pytest.raises(Conflict):
            await moving
        for answer, undisturbed in zip(await asyncio.gather(*running), plain, strict=True):
            answer.check(undisturbed, attempts=2)
            assert answer.last[0].timing.decode_worker_id == "worker-2"
        await it.wait_empty("worker-2", timeout_s=20)


def workers(model: str, engine_args: str = "", count: int = 2) -> dict[str, Any]:
    """A deployment of workers of both roles."""
    arguments = {
        "dtype": "float32",
        "max_model_len": "2048",
        "engine_args": f"--enforce-eager {engine_args}",
    }
    return {
        "engine": "vllm",
        "model": f"models/{model}",
        "prefill_count": 0,
        "decode_count": 0,
        "worker_count": count,
        "settings": tuple(("worker", *one) for one in arguments.items()),
    }

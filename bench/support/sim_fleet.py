"""Simulated workers of one deployment, and requests to them with answers that are known in advance."""

from __future__ import annotations

from typing import Any, Final

from bench.support.services import Services
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace_cli.up.supervisor import ChildProcess
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import parse_settings

SERVED_MODEL: Final = "sim"
_MODEL: Final = "sim:decode_step_s=0.005,verify=off"
_PROMPT_TOKENS: Final = 200
_REQUEST_S: Final = 60.0


async def start_workers(
    services: Services, role: str, count: int, registry: str, *flags: str, name: str = ""
) -> ChildProcess:
    """Starts a process with `count` workers of a role. `name` is that of the process, or the role."""
    return await services.start(
        *(role, f"--worker-id={name or role}", f"--workers-per-process={count}"),
        *(f"--registry={registry}", *flags),
        *(f"--model={_MODEL}", f"--served-model={SERVED_MODEL}"),
        "--internal-listen=127.0.0.1:0",
        name=name,
    )


class SimRequests:
    """Requests with a remote prefill of one of `prompts` prompts, for `answer_tokens` tokens."""

    prompt_tokens = _PROMPT_TOKENS

    def __init__(self, prompts: int, answer_tokens: int) -> None:
        self.answer_tokens = answer_tokens
        model = SimModel(parse_settings(_MODEL))
        self._prompts = [[first + 1, *range(1, _PROMPT_TOKENS)] for first in range(prompts)]
        self._answers = [model.expected_tokens(prompt, answer_tokens) for prompt in self._prompts]

    async def ask(self, stub: Any, number: int) -> tuple[bool, int]:
        """Whether the answer is right, and the attempts that it took. Raises AioRpcError."""
        number %= len(self._prompts)
        request = inference_pb2.GenerateRequest(
            model=SERVED_MODEL,
            tokens=inference_pb2.TokenIds(ids=self._prompts[number]),
            sampling=sampling_pb2.SamplingParams(
                max_tokens=self.answer_tokens, temperature=0.0, ignore_eos=True
            ),
            prefill_placement=inference_pb2.PREFILL_PLACEMENT_REMOTE,
        )
        tokens: list[int] = []
        attempts = 0
        async for response in stub.Generate(request, timeout=_REQUEST_S):
            tokens += response.token_ids
            attempts = max(attempts, response.timing.attempts)
        return tuple(tokens) == self._answers[number], attempts

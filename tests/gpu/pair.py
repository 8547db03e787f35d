"""A job: a prefill and a decode engine on one device, compared with one engine alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from headrace_engine.interface import Sampling
from tests.vllm.pair import Answer, reset, running_pair

LENGTHS = (2, 33, 300, 700)
SHARE = 0.3
# With log probabilities, which distinguish a near tie from a wrong byte.
SAMPLING = Sampling(temperature=0.0, max_tokens=16, logprobs=5)


@dataclass(slots=True)
class Tokens:
    """An answer's tokens, and for each the likeliest ones as [token id, log probability]."""

    token_ids: list[int]
    likeliest: list[list[tuple[int, float]]]


@dataclass(slots=True)
class PairResult:
    """By prompt: the answers of one engine, and of the pair with the first token from decode, from prefill and from its
    hidden state.

    `schedulers` and `graphs`: vLLM's choices, for prefill and decode.
    """

    session: str
    schedulers: list[str]
    graphs: list[str]
    plain: list[Tokens] = field(default_factory=list)
    split: list[Tokens] = field(default_factory=list)
    after_first: list[Tokens] = field(default_factory=list)
    from_hidden_state: list[Tokens] = field(default_factory=list)


def tokens_of(answer: Answer) -> Tokens:
    return Tokens(answer.token_ids, [list(entry.alternatives) for entry in answer.logprobs])


async def measure(
    model: str,
    dtype: str,
    enforce_eager: bool,
    gpu_direct: bool,
    engine_args: str = "",
    kv_cache_gib: float = 1.0,
    **more: object,
) -> PairResult:
    """Starts a pair of engines and generates on one and on both.

    Without `kv_cache_gib`, each engine uses a share of the device. They start one after the other. `more`: of both.
    """
    changes: dict[str, object] = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": enforce_eager,
        "gpu_direct": gpu_direct,
        "engine_args": engine_args,
        "kv_cache_gib": kv_cache_gib,
        "gpu_memory_utilization": SHARE,
        "max_num_batched_tokens": 256,
        **more,
    }
    random = Random(7)
    async with running_pair(prefill=changes, decode=changes) as pair:
        configs = [one._llm.vllm_config for one in (pair.prefill, pair.decode) if one._llm]
        result = PairResult(
            pair.decode.descriptor.ranks[0].session,
            [one.scheduler_config.get_scheduler_cls().__name__ for one in configs],
            [one.compilation_config.cudagraph_mode.name for one in configs],
        )
        for length in LENGTHS:
            prompt = [random.randrange(3, 500) for _ in range(length)]
            result.plain.append(tokens_of(await pair.plain(prompt, SAMPLING)))
            await reset(pair.decode)
            result.split.append(tokens_of(await pair.split(prompt, SAMPLING)))
            await pair.reset()
            for answers, run in (
                (result.after_first, pair.split_after_first),
                (result.from_hidden_state, pair.split_from_hidden_state),
            ):
                answers.append(tokens_of(await run(prompt, SAMPLING)))
                await pair.reset()
        return result

"""The chunks of a step."""

from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.interface import DecodeWork, Sampling
from headrace_engine.sim.model.model import SimModel
from headrace_engine.sim.model.settings import SimSettings
from headrace_engine.sim.sequence import Sequence, decode_sequence
from headrace_engine.sim.stepper import plan_step

MODEL = SimModel(SimSettings(1, 1, 8, 100))


def sequence(prompt_tokens: int, computed: int = 0) -> Sequence:
    work = DecodeWork("x", tuple(range(prompt_tokens)), Sampling(), remote_kv=False)
    made = decode_sequence(work, work.sampling, MODEL, 10_000)
    made.blocks_allocated((), cached_tokens=computed)
    return made


def test_a_lone_prompt_gets_the_whole_budget() -> None:
    chunks = plan_step([sequence(100)], 64, 16)
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(0, 64)]
    chunks = plan_step([sequence(100, 64)], 64, 16)
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(64, 100)]


def test_prompts_share_the_budget_left_by_decoding() -> None:
    one, two, decoding = sequence(100), sequence(100), sequence(50, 49)
    chunks = plan_step([one, two, decoding], 65, 16)
    assert [(chunk.sequence, chunk.end - chunk.start) for chunk in chunks] == [
        (decoding, 1),
        (one, 32),
        (two, 32),
    ]


@given(
    st.lists(st.tuples(st.integers(2, 200), st.integers(0, 12)), max_size=12),
    st.integers(16, 128),
)
def test_chunks_fit_and_every_step_makes_progress(
    requests: list[tuple[int, int]], budget: int
) -> None:
    sequences = [
        sequence(count, min(blocks * 16, (count - 1) // 16 * 16)) for count, blocks in requests
    ]
    chunks = plan_step(sequences, budget, 16)
    assert bool(chunks) == bool(sequences)
    prompt_tokens = 0
    for chunk in chunks:
        assert chunk.start == chunk.sequence.computed < chunk.end <= len(chunk.sequence.tokens)
        assert chunk.end == len(chunk.sequence.tokens) or chunk.end % 16 == 0
        prompt_tokens += 0 if chunk.is_decode else chunk.end - chunk.start
    assert prompt_tokens <= max(budget, 16)

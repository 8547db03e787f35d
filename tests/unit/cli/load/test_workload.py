"""Plans of a load."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import pytest

from headrace_cli.load.dataset import TRACE_BLOCK_TOKENS, read_dataset
from headrace_cli.load.workload import PlannedRequest, RandomShape, at_rate, random_requests
from headrace_common.errors import ConfigError


def test_equal_seeds_make_equal_requests_and_other_seeds_others() -> None:
    shape = RandomShape(input_tokens=20, output_tokens=10, range_ratio=0.5)
    first = random_requests(shape, 50, seed=1)
    assert first == random_requests(shape, 50, seed=1)
    assert first != random_requests(shape, 50, seed=2)
    # More requests begin with the same ones.
    assert random_requests(shape, 60, seed=1)[:50] == first
    lengths = {len(request.token_ids) for request in first}
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(lengths) > 10
    assert all(5 <= request.output_tokens <= 15 for request in first)


def test_prefixes_are_shared_in_groups() -> None:
    shape = RandomShape(input_tokens=4, prefix_tokens=8, prefixes=3)
    requests = random_requests(shape, 9, seed=0)
    groups = [request.token_ids[:8] for request in requests]
    assert len(set(groups)) == 3
    assert groups[:3] == groups[3:6]
    assert {len(request.token_ids) for request in requests} == {12}
    assert len({request.token_ids for request in requests}) == 9


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"input_tokens": 0}, "input_tokens"),
        ({"output_tokens": 2_000_000}, "output_tokens"),
        ({"range_ratio": 1.0}, "range_ratio"),
        ({"prefix_tokens": -1}, "prefix_tokens"),
        ({"prefixes": 0}, "prefixes"),
    ],
)
def test_impossible_shapes_are_refused(values: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        RandomShape(**values)  # type: ignore[arg-type]
    assert caught.value.metadata["field"] == word


def gaps(rate: float, burstiness: float) -> list[float]:
    planned = at_rate([PlannedRequest(text="x")] * 20_001, rate, burstiness, seed=3)
    starts = [request.start_s or 0.0 for request in planned]
    assert starts[0] == 0.0
    return [after - before for before, after in itertools.pairwise(starts)]


def test_arrivals_keep_their_rate_and_burstiness() -> None:
    assert set(gaps(4.0, math.inf)) == {0.25}
    for burstiness in (0.25, 1.0, 4.0):
        found = gaps(10.0, burstiness)
        mean = statistics.fmean(found)
        # The coefficient of variation of a gamma distribution is the shape to the power -0.5.
        assert mean == pytest.approx(0.1, rel=0.05)
        assert statistics.stdev(found) / mean == pytest.approx(burstiness**-0.5, rel=0.05)
    with pytest.raises(ConfigError, match="rate"):
        at_rate([], -1, 1, 0)


def dataset(tmp_path: Path, text: str, **more: float) -> list[PlannedRequest]:
    path = tmp_path / "file"
    path.write_text(text)
    return read_dataset(path, 100, output_tokens=64, **more)


def test_own_lines_have_a_prompt_messages_or_tokens(tmp_path: Path) -> None:
    text = """
    {"prompt": "Hello", "output_tokens": 5}
    {"messages": [{"role": "user", "content": "Hi"}]}

    {"prompt_token_ids": [1, 2, 3]}
    """
    assert dataset(tmp_path, text) == [
        PlannedRequest(text="Hello", output_tokens=5, exact=True),
        PlannedRequest(messages=(("user", "Hi"),), output_tokens=64, exact=False),
        PlannedRequest(token_ids=(1, 2, 3), output_tokens=64, exact=False),
    ]


def test_conversations_are_asked_their_first_question(tmp_path: Path) -> None:
    text = """[
      {"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B"}]},
      {"conversations": [{"from": "gpt", "value": "B"}]},
      {"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}]}
    ]"""
    assert [request.messages for request in dataset(tmp_path, text)] == [
        (("user", "A?"),),
        (("system", "S"), ("user", "Q")),
    ]


def test_a_trace_has_times_and_shares_blocks(tmp_path: Path) -> None:
    size = TRACE_BLOCK_TOKENS
    lines = [
        f'{{"timestamp": 1000, "input_length": {size + 5}, "output_length": 7, "hash_ids": [1, 2]}}',
        f'{{"timestamp": 3000, "input_length": {2 * size}, "output_length": 9, "hash_ids": [1, 3]}}',
    ]
    first, second = dataset(tmp_path, "\n".join(lines), trace_speed=2.0)
    assert (first.start_s, second.start_s) == (0.5, 1.5)
    assert (len(first.token_ids), len(second.token_ids)) == (size + 5, 2 * size)
    assert first.token_ids[:size] == second.token_ids[:size]
    assert first.token_ids[size:] != second.token_ids[size : size + 5]
    assert (first.output_tokens, second.output_tokens) == (7, 9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no request"),
        ("{", "neither a JSON list nor lines of JSON"),
        ('{"prompt": "x"}\n{"prompt": 5}', "entry 2 of .*: prompt must be a text"),
        ('{"prompt": "x", "output_tokens": 0}', "output_tokens must be a number from 1"),
        ('{"question": "x"}', "field 'prompt' is missing"),
        ("[5]", "entry 1 of .*: it is no object"),
        ('{"timestamp": 0, "input_length": 3, "hash_ids": []}', "'output_length' is missing"),
    ],
)
def test_wrong_files_are_refused_by_entry(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        dataset(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        read_dataset(tmp_path / "absent", 1, output_tokens=1)

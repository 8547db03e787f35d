"""Defaults of requests, and refusals that name the field."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import (
    adapter_pb2,
    first_token_pb2,
    image_pb2,
    priority_pb2,
    sampling_pb2,
)
from headrace_common.callers.priority import Priority
from headrace_common.durations import duration_from_seconds
from headrace_common.errors import InvalidRequest
from headrace_common.registry.adapters import Adapter
from headrace_decode.proto import keep_terms, kept_to_proto, work_from_proto
from headrace_engine.interface import PromptImage, Sampling, TokenLogprobs
from headrace_engine.proto import logprobs_to_proto, require_vocabulary, sampling_from_proto
from headrace_kv.prefix.events import Tier
from headrace_kv.tiers.promises import KeepTerms, Kept


def request(**changes: object) -> decode_pb2.GenerateRequest:
    fields: dict[str, object] = {
        "transfer_id": "x1",
        "token_ids": [5, 6, 7],
        "sampling": sampling_pb2.SamplingParams(max_tokens=4),
        "stop_token_ids": [2],
        "remote_prefill": True,
    }
    return decode_pb2.GenerateRequest(**{**fields, **changes})  # type: ignore[arg-type]


def test_absent_sampling_fields_take_the_defaults() -> None:
    sampling = sampling_from_proto(sampling_pb2.SamplingParams(max_tokens=9), [3])
    assert sampling == Sampling(max_tokens=9, stop_token_ids=(3,))


def test_zero_is_not_absent() -> None:
    params = sampling_pb2.SamplingParams(max_tokens=1, temperature=0.0, seed=0, logprobs=0)
    sampling = sampling_from_proto(params, [])
    assert (sampling.temperature, sampling.seed, sampling.logprobs) == (0.0, 0, 0)


def test_every_wrong_field_is_named_at_once() -> None:
    wrong = request(transfer_id="", token_ids=[], sampling=sampling_pb2.SamplingParams())
    with pytest.raises(InvalidRequest) as refused:
        work_from_proto(wrong)
    assert set(refused.value.violations) == {"transfer_id", "token_ids", "sampling.max_tokens"}


def test_a_salt_reaches_the_engine_if_it_is_one() -> None:
    assert work_from_proto(request()).cache_salt == ""
    assert work_from_proto(request(cache_salt="0a1b")).cache_salt == "0a1b"
    for wrong in ("tenant-a", "a" * 65):
        with pytest.raises(InvalidRequest) as refused:
            work_from_proto(request(cache_salt=wrong))
        assert set(refused.value.violations) == {"cache_salt"}


def test_an_adapter_is_one_of_the_workers() -> None:
    known = [Adapter("poet", "aa"), Adapter("coder", "bb")]

    def asked(name: str, digest: str, salt: str = "0a") -> decode_pb2.GenerateRequest:
        return request(cache_salt=salt, adapter=adapter_pb2.Adapter(name=name, digest=digest))

    assert work_from_proto(request(), known).adapter is None
    assert work_from_proto(asked("coder", "bb"), known).adapter == Adapter("coder", "bb")
    for wrong, field, why in (
        (asked("coder", "aa"), "adapter", "with another digest than this worker's"),
        (asked("painter", "aa"), "adapter", "not among this worker's"),
        (asked("poet", "x"), "adapter.digest", "0-9 and a-f"),
        (asked("poet", "aa", ""), "cache_salt", "must not be empty beside an adapter"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            work_from_proto(wrong, known)
        assert why in refused.value.violations[field]


def test_a_prompt_of_one_token_needs_no_transfer() -> None:
    assert work_from_proto(request()).remote_kv
    assert not work_from_proto(request(token_ids=[5])).remote_kv
    assert not work_from_proto(request(remote_prefill=False)).remote_kv


def test_generated_tokens_leave_a_prompt_and_a_token_to_generate() -> None:
    work = work_from_proto(request(generated_token_count=2))
    assert (work.prompt_tokens, work.generated_tokens, work.transferable_tokens) == (1, 2, 2)
    with pytest.raises(InvalidRequest) as refused:
        work_from_proto(request(generated_token_count=3))
    assert set(refused.value.violations) == {"generated_token_count"}
    params = sampling_pb2.SamplingParams(max_tokens=2)
    with pytest.raises(InvalidRequest) as refused:
        work_from_proto(request(generated_token_count=2, sampling=params))
    assert set(refused.value.violations) == {"sampling.max_tokens"}


def test_the_removed_first_token_policy_of_an_older_router_is_named() -> None:
    with pytest.raises(InvalidRequest) as refused:
        work_from_proto(request(first_token=3))
    assert set(refused.value.violations) == {"first_token"}


@pytest.mark.parametrize("policy_name", ["PREFILL", "HIDDEN"])
def test_a_first_token_from_prefill_needs_a_transfer_of_the_whole_prompt(policy_name: str) -> None:
    policy = first_token_pb2.FirstTokenPolicy.Value(f"FIRST_TOKEN_POLICY_{policy_name}")
    work = work_from_proto(request(first_token=policy, token_ids=[5]))
    assert work.remote_kv
    assert work.awaits_first_token
    assert work.from_hidden_state == (policy_name == "HIDDEN")
    assert work.transferable_tokens == 1
    for changes in ({"remote_prefill": False}, {"generated_token_count": 1}):
        with pytest.raises(InvalidRequest) as refused:
            work_from_proto(request(first_token=policy, **changes))
        assert set(refused.value.violations) == {"first_token"}


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_prefill": False},
        {"first_token": first_token_pb2.FIRST_TOKEN_POLICY_PREFILL},
        {"computes_from": 99},
    ],
)
def test_a_divided_prompt_needs_a_transfer_and_tokens_of_decode(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        work_from_proto(request(**{"computes_from": 1, **changes}))
    assert set(refused.value.violations) == {"computes_from"}


def test_tokens_keep_their_order_and_alternatives() -> None:
    two = (TokenLogprobs(-0.5, ((1, -0.5),)), TokenLogprobs(-2.0, ((3, -2.0), (4, -3.0))))
    found = [logprobs_to_proto(one) for one in two]
    assert [entry.logprob for entry in found] == [-0.5, -2.0]
    assert [alternative.token_id for alternative in found[1].alternatives] == [3, 4]


def test_a_promise_is_asked_for_an_owner_and_at_most_an_hour() -> None:
    assert work_from_proto(request()).keep is None
    keep = decode_pb2.Keep(duration=duration_from_seconds(90.5), owner="0a")
    assert work_from_proto(request(keep=keep)).keep == KeepTerms("x1", "0a", 90.5)
    ended = decode_pb2.KeepRequest(transfer_id="x1", keep=decode_pb2.Keep(owner="0a"))
    assert keep_terms(ended) == KeepTerms("x1", "0a", 0.0)
    for wrong in (
        decode_pb2.Keep(owner="tenant", duration=duration_from_seconds(3_601)),
        decode_pb2.Keep(duration=Duration(seconds=-1)),
    ):
        for read in (
            lambda wrong=wrong: work_from_proto(request(keep=wrong)),
            lambda wrong=wrong: keep_terms(decode_pb2.KeepRequest(keep=wrong)),
        ):
            with pytest.raises(InvalidRequest) as refused:
                read()
            assert set(refused.value.violations) == {"keep.owner", "keep.duration"}


def test_what_is_not_promised_has_its_reason() -> None:
    kept = kept_to_proto(Kept(96, Tier.HOST, 30.0))
    assert (kept.tokens, kept.tier, kept.duration.seconds, kept.reason) == (96, "host", 30, "")
    assert "below its KV memory" in kept_to_proto(None).reason
    assert "no room" in kept_to_proto(Kept()).reason


def test_the_engine_gets_the_class_of_a_request() -> None:
    assert work_from_proto(request()).priority is Priority.NORMAL
    low = request(priority=priority_pb2.PRIORITY_LOW)
    assert work_from_proto(low).priority is Priority.LOW


def test_prompt_logprobs_need_a_whole_prompt_to_compute() -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=4, prompt_logprobs=0)
    assert work_from_proto(request(sampling=sampling, remote_prefill=False)).sampling == Sampling(
        max_tokens=4, stop_token_ids=(2,), prompt_logprobs=0
    )
    for changes in ({}, {"remote_prefill": False, "generated_token_count": 1}):
        with pytest.raises(InvalidRequest) as refused:
            work_from_proto(request(sampling=sampling, **changes))
        assert set(refused.value.violations) == {"sampling.prompt_logprobs"}
    entries = (TokenLogprobs(-1.0, ((4, -0.5),), 9),)
    (found,) = map(logprobs_to_proto, entries)
    assert (found.logprob, found.alternatives[0].token_id, found.rank) == (-1.0, 4, 9)


def test_images_lie_before_the_last_token_of_the_prompt() -> None:
    def asked(*spans: tuple[int, int], **changes: object) -> decode_pb2.GenerateRequest:
        images = [
            image_pb2.PromptImage(
                data=b"png", content_hash=b"h" * 16, start_token=start, token_count=count
            )
            for start, count in spans
        ]
        return request(token_ids=range(10), images=images, **changes)

    assert work_from_proto(asked((0, 4), (4, 5))).images == (
        PromptImage(b"png", b"h" * 16, 0, 4),
        PromptImage(b"png", b"h" * 16, 4, 5),
    )
    for wrong, field in (
        (asked((0, 4), (3, 5)), "images[1].start_token"),
        (asked((0, 4), (4, 0)), "images[1].token_count"),
        (asked((0, 10)), "images[0].token_count"),
        (asked((0, 8), generated_token_count=2), "images[0].token_count"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            work_from_proto(wrong)
        assert set(refused.value.violations) == {field}
    empty = request(token_ids=range(10), images=[image_pb2.PromptImage(token_count=1)])
    with pytest.raises(InvalidRequest) as refused:
        work_from_proto(empty)
    assert set(refused.value.violations) == {"images[0].data", "images[0].content_hash"}


def test_only_placeholders_of_images_may_lie_beyond_the_vocabulary() -> None:
    image = PromptImage(b"x", bytes(16), start_token=1, token_count=2)
    require_vocabulary((9, 10, 10, 9), (image,), 10)
    with pytest.raises(InvalidRequest) as refused:
        require_vocabulary((9, 10, 10, 11), (image,), 10)
    assert set(refused.value.violations) == {"token_ids[3]"}

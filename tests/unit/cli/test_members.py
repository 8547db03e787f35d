"""Members as `headrace workers` shows them: on terminals, in pipes, to programs, with prefix faults."""

from __future__ import annotations

import io
import json

from rich.console import Console

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2
from headrace_cli.members import Row, prefix_faults, workers_object, workers_view
from headrace_cli.output import json_text

Role = registry_pb2.Member.Role


def row(name: str, key: int, size: int = 16, *, router: bool = False) -> Row:
    member = registry_pb2.Member(
        worker_id=name,
        role=Role.ROLE_ROUTER if router else Role.ROLE_DECODE,
        layout=layout_pb2.KvLayout(groups=[layout_pb2.CacheGroup(block_tokens=16)]),
    )
    return Row(member, hashing=worker_pb2.KvHashing(key_fingerprint=key, block_tokens=size))


def test_workers_that_hash_prefixes_differently_are_named() -> None:
    rows = [
        row("r0", 0xA, 0, router=True),
        row("good", 0xA),
        row("silent", 0, 0),
        row("foreign", 0xB),
        row("odd", 0xA, 32),
    ]
    assert prefix_faults(rows) == [
        "foreign gets no credit for its cache: it hashes prefixes under key 0000000b, but routers under 0000000a",
        "odd gets no credit for its cache: it hashes prefixes in blocks of 32 tokens, but routers of 16",
    ]


LONG = "decode-in-the-second-rack-of-the-first-hall-0017"


def worker(name: str, role: Role.ValueType = Role.ROLE_DECODE) -> Row:
    member = registry_pb2.Member(
        worker_id=name,
        incarnation="0" * 16,
        role=role,
        endpoint="10.0.0.17:7053",
        model="SmolLM2-135M-Instruct",
        max_num_seqs=8,
        transport="mooncake",
        layout=layout_pb2.KvLayout(
            model="m",
            tensor_parallel_size=2,
            stage_starts=[0],
            groups=[
                layout_pb2.CacheGroup(
                    name="attention",
                    layers=[0],
                    kind=layout_pb2.CacheGroup.KIND_TOKENS,
                    head_count=2,
                    block_tokens=16,
                )
            ],
        ),
    )
    status = worker_pb2.WatchStatusResponse(
        running_requests=3,
        waiting_requests=1,
        total_blocks=16384,
        reserved_blocks=10,
        quarantined_blocks=2,
        used_blocks=7,
        active_transfers=4,
    )
    hashing = worker_pb2.KvHashing(key_fingerprint=0xABC, block_tokens=16)
    return Row(member, "serving", status, hashing)


def router() -> Row:
    member = registry_pb2.Member(worker_id="router-0", role=Role.ROLE_ROUTER, endpoint="h:1")
    return Row(member)


def shown(rows: list[Row], width: int, *, terminal: bool = True) -> str:
    screen = io.StringIO()
    console = Console(
        file=screen, width=width, force_terminal=terminal, color_system=None, soft_wrap=terminal
    )
    console.print(workers_view(rows, console))
    return screen.getvalue()


def test_a_pipe_gets_every_column_in_one_line_for_each_member() -> None:
    text = shown([worker(LONG), worker("x" * 63)], 1000, terminal=False)
    (line,) = (line for line in text.splitlines() if LONG in line)
    assert line.split() == [
        LONG, "decode", "2", "10.0.0.17:7053", "serving", "3", "1", "12/16384", "7", "4",
        "16/00000abc", "SmolLM2-135M-Instruct",
    ]  # fmt: skip


def test_pairs_that_cannot_talk_are_named_with_their_fields() -> None:
    prefill = worker("prefill-0", Role.ROLE_PREFILL)
    prefill.member.transport = "in_memory"
    rows = [prefill, worker("decode-0")]
    line = "prefill-0 cannot hand KV over to decode-0"
    assert line in shown(rows, 300)
    assert "transport (in_memory != mooncake)" in shown(rows, 300)
    (pair,) = json.loads(json_text(workers_object("r:1", rows)))["pairs_apart"]
    assert pair == {
        "prefill_ids": ["prefill-0"],
        "decode_ids": ["decode-0"],
        "fields": {"transport": "in_memory != mooncake"},
    }


def test_a_pair_that_hands_over_nothing_any_more_is_named_with_the_reason() -> None:
    decode = worker("decode-0")
    assert decode.status is not None
    decode.status.distrusted_workers.add(
        worker_id="prefill-0", incarnation="a" * 16, detail="layer 3, head 1 differ by 0.9"
    )
    line = "decode-0 accepts no KV from prefill-0: layer 3, head 1 differ by 0.9"
    assert line in shown([decode], 300)
    (member,) = json.loads(json_text(workers_object("r:1", [decode])))["members"]
    (named,) = member["status"]["distrusted_workers"]
    assert named["detail"] == "layer 3, head 1 differ by 0.9"


def test_a_worker_of_both_roles_shows_the_role_that_the_policy_leaves_it() -> None:
    member = registry_pb2.Member(worker_id="w0", role=Role.ROLE_BOTH)
    left = Row(member, policy_role=registry_pb2.WORKER_ROLE_PREFILL)
    assert "both, prefill by policy" in shown([left], 120)
    assert "policy" not in shown([Row(member)], 120)
    assert workers_object("r", [left])["members"][0]["role_by_policy"] == "WORKER_ROLE_PREFILL"

"""Names of blocks in a remote pool."""

from __future__ import annotations

from dataclasses import replace

from headrace_kv.layout import KvLayout
from headrace_kv.tiers.pool import PoolKeys, pool_secret

SECRET = pool_secret(0x1234_5678_9ABC_DEF0)
LAYOUT = KvLayout.attention(
    model="m",
    dtype="float16",
    layer_count=3,
    kv_head_count=4,
    block_tokens=16,
    parts={"kv": 64},
    tensor_parallel_size=2,
)


def name(
    layout: KvLayout = LAYOUT,
    prefix: int = 7,
    secret: bytes = SECRET,
    stage: int = 0,
    shard: int = 0,
) -> str:
    keys = PoolKeys(secret, layout)
    (found,) = keys.of_shard(stage, keys.shards[shard], [prefix])
    return found


def test_whatever_changes_the_bytes_of_a_block_changes_its_name() -> None:
    group = LAYOUT.groups[0]
    others = [
        name(replace(LAYOUT, model="other")),
        name(replace(LAYOUT, stage_starts=(0, 1))),
        name(replace(LAYOUT, groups=(replace(group, block_tokens=32),))),
        name(replace(LAYOUT, groups=(replace(group, head_count=8),))),
        name(replace(LAYOUT, tensor_parallel_size=1)),
        name(replace(LAYOUT, tensor_parallel_size=4)),
        name(shard=1),
        name(stage=1),
        name(prefix=8),
        name(secret=pool_secret(1)),
    ]
    assert len({name(), *others}) == 1 + len(others)


def test_prefill_and_decode_use_the_same_names() -> None:
    # Decode workers state a width of local broadcasts.
    assert name(replace(LAYOUT, broadcast_width=2)) == name()


def test_workers_of_unlike_sizes_use_other_names_for_the_same_heads() -> None:
    layout = replace(LAYOUT, groups=(replace(LAYOUT.groups[0], head_count=1),))
    sizes = (1, 2, 4)
    names = {name(replace(layout, tensor_parallel_size=size)) for size in sizes}
    assert len(names) == len(sizes)


def test_the_names_of_blocks_are_those_of_each_shard_in_each_stage() -> None:
    keys = PoolKeys(SECRET, replace(LAYOUT, stage_starts=(0, 1)))
    prefixes = [1, 2**255]
    places = [(stage, shard) for stage in range(2) for shard in keys.shards]
    assert [shard.heads for _, shard in places] == 2 * [range(2), range(2, 4)]
    expected = [one for stage, shard in places for one in keys.of_shard(stage, shard, prefixes)]
    assert keys.of_blocks(prefixes) == expected
    assert keys.objects_per_block == len(places)


def test_a_name_does_not_show_the_hash_of_the_prefix() -> None:
    assert f"{7:x}".zfill(16) not in name(prefix=7)
    assert name(prefix=7, secret=pool_secret(2)) != name(prefix=7, secret=pool_secret(3))

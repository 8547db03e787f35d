"""The order of reuse, by class and time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.callers.priority import Priority
from headrace_kv.tiers.blocks import IdleBlocks


def idle(count: int, *blocks: tuple[int, Priority]) -> IdleBlocks:
    found = IdleBlocks(count)
    for block, priority in blocks:
        found.add(block, priority)
    return found


@given(st.lists(st.sampled_from(Priority), min_size=1, max_size=12))
def test_lower_classes_come_first_and_older_blocks_within_a_class(classes: list[Priority]) -> None:
    blocks = idle(len(classes), *enumerate(classes))
    wanted = sorted(range(len(classes)), key=lambda block: (-classes[block], block))
    assert [blocks.pop() for _ in classes] == wanted
    assert len(blocks) == 0


@given(st.lists(st.integers(1, 5), max_size=20), st.sampled_from(Priority))
def test_blocks_of_one_class_are_reused_in_their_order(
    counts: list[int], priority: Priority
) -> None:
    blocks, added, popped = IdleBlocks(3), 0, 0
    for count in counts:
        for block in range(added, added + count):
            blocks.add(block, priority)
        added += count
        assert blocks.pop() == popped
        popped += 1
    assert sorted(blocks) == list(range(popped, added))


def test_a_class_protects_a_block_for_one_turn_of_all_blocks() -> None:
    blocks = idle(4, (0, Priority.HIGH))
    for block in range(1, 6):
        blocks.add(block, Priority.NORMAL)
    # After four reuses it is a normal block, behind those that are normal already.
    assert [blocks.pop() for _ in range(6)] == [1, 2, 3, 4, 5, 0]
    blocks = idle(4, (0, Priority.HIGH))
    reused = []
    for block in range(1, 30):
        blocks.add(block, Priority.NORMAL)
        reused.append(blocks.pop())
    assert 0 in reused
    assert reused.index(0) >= 4


def test_a_block_with_a_holder_again_is_not_reused() -> None:
    blocks = idle(3, (0, Priority.LOW), (1, Priority.HIGH))
    blocks.remove(0)
    assert blocks.pop() == 1
    for call in (lambda: blocks.remove(0), blocks.pop):
        with pytest.raises(KeyError):
            call()

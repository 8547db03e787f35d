"""The store of conversations: its bounds by tenant and time, and branches."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.inference.v1 import inference_pb2
from headrace_common.errors import NotFound
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.store import AskElsewhere, Store, nowhere
from tests.set_clock import SetClock

KEEP_S = 60.0


class Conversations(ConversationStore):
    """Conversations in a store of their own."""

    def __init__(self, bytes_max: int, ask: AskElsewhere = nowhere, **bounds: Any) -> None:
        self.clock = SetClock(0.0)
        self.store = Store(bytes_max, KEEP_S, ask, self.clock, **bounds)
        super().__init__(self.store)

    @property
    def stored_bytes(self) -> int:
        return self.store.stored_bytes


def store_of(bytes_max: int = 2**20) -> tuple[Conversations, SetClock]:
    store = Conversations(bytes_max)
    return store, store.clock


def chat_of(text: str, role: str = "user") -> inference_pb2.Chat:
    return inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role=role, content=text)])


async def say(store: ConversationStore, tenant: str, previous: str, own: str, text: str) -> str:
    """One turn. Returns the texts of its prompt."""
    turn = await store.resume(tenant, previous)
    chat = chat_of(text)
    turn.complete(chat, "rules")
    turn.save(own, [inference_pb2.ChatMessage(role="assistant", content=text.upper())])
    return " ".join(message.content for message in chat.messages)


async def test_turns_and_branches_have_the_messages_before_them() -> None:
    store, _ = store_of()
    assert await say(store, "t", "", "1", "a") == "rules a"
    assert await say(store, "t", "1", "2", "b") == "rules a A b"
    one = store.stored_bytes
    assert await say(store, "t", "1", "3", "c") == "rules a A c"
    assert await say(store, "t", "2", "4", "d") == "rules a A b B d"
    assert await say(store, "t", "3", "5", "e") == "rules a A c C e"
    assert store.stored_bytes > one
    # A turn takes no copy of what is before it.
    before = store.stored_bytes
    await say(store, "t", "5", "6", "f" * 10)
    assert store.stored_bytes - before < 1_000


async def test_an_answer_with_an_earlier_id_replaces_it() -> None:
    store, _ = store_of()
    await say(store, "t", "", "1", "a")
    await say(store, "t", "1", "2", "b")
    await say(store, "t", "1", "2", "c")
    assert await say(store, "t", "2", "3", "d") == "rules a A c C d"
    await say(store, "t", "", "1", "x")
    assert await say(store, "t", "1", "4", "y") == "rules x X y"


async def test_the_instructions_join_an_earlier_system_message() -> None:
    store, _ = store_of()
    turn = await store.resume("t", "")
    chat = chat_of("be", role="system")
    turn.complete(chat, "first")
    assert [message.content for message in chat.messages] == ["first\n\nbe"]
    turn.save("1", [])
    assert store.find_here("t", "1") == chat_of("be", role="system").SerializeToString()


async def test_a_conversation_ends_after_its_time() -> None:
    store, clock = store_of()
    await say(store, "t", "", "1", "a")
    clock.now_s = KEEP_S
    await say(store, "t", "1", "2", "b")
    clock.now_s = 2 * KEEP_S
    await say(store, "t", "2", "3", "c")
    clock.now_s += KEEP_S + 1
    with pytest.raises(NotFound, match="send all of its messages"):
        await store.resume("t", "3")
    assert store.stored_bytes == 0


async def test_tenants_neither_see_nor_evict_each_other() -> None:
    store, _ = store_of(bytes_max=100_000)
    await say(store, "a", "", "mine", "secret")
    with pytest.raises(NotFound):
        await store.resume("b", "mine")
    for number in range(2_000):
        await say(store, "b", "", f"b{number}", "x" * 1_000)
        assert store.stored_bytes <= 100_000
    assert store.find_here("a", "mine")
    # The oldest go first.
    assert store.find_here("b", "b1999")
    with pytest.raises(NotFound):
        await store.resume("b", "b0")


async def test_a_tenant_within_its_share_loses_nothing() -> None:
    store, clock = store_of(bytes_max=100_000)
    for number in range(100):
        await say(store, "big", "", f"b{number}", "x" * 1_000)
    for number in range(10):
        await say(store, "small", "", f"s{number}", "x" * 1_000)
    assert all(store.find_here("small", f"s{number}") for number in range(10))
    # The memory of tenants that send nothing more is free after their time.
    clock.now_s = KEEP_S + 2
    await say(store, "other", "", "o", "x")
    assert store.stored_bytes < 5_000


async def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    store, _ = store_of(bytes_max=20_000)
    await say(store, "t", "", "1", "x" * 50_000)
    assert store.stored_bytes == 0
    off, _ = store_of(bytes_max=0)
    await say(off, "t", "", "1", "x")
    assert not off.keeps
    assert off.find_here("t", "1") is None


async def test_other_processes_are_asked_last() -> None:
    asked: list[tuple[str, str, str]] = []

    async def ask(tenant: str, response_id: str, operation: str, arguments: bytes) -> bytes | None:
        asked.append((tenant, response_id, operation))
        return chat_of("far").SerializeToString() if response_id == "far" else None

    store = Conversations(2**20, ask)
    await say(store, "t", "", "1", "a")
    await store.resume("t", "1")
    assert await say(store, "t", "far", "2", "b") == "rules far b"
    assert await say(store, "t", "2", "3", "c") == "rules far b B c"
    with pytest.raises(NotFound):
        await store.resume("t", "x" * 10_000)
    assert asked == [("t", "far", "messages")]


async def test_a_tenant_has_so_many_entries_at_most() -> None:
    store = Conversations(2**20, entries_max=2)
    for number in range(3):
        await say(store, "t", "", str(number), "a")
    assert [bool(store.find_here("t", str(number))) for number in range(3)] == [False, True, True]


def test_what_has_had_its_time_is_not_stored_again() -> None:
    store, clock = store_of()
    store.save("t", "1", "", b"", b"x")
    entry = store._find("t", "1")
    assert entry is not None
    clock.now_s = KEEP_S + 1
    store.store.put("t", entry)
    assert store.stored_bytes == 0

"""Conversations that clients continue by the id of an answer, without sending the earlier messages again."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import current_input
from headrace_common.errors import NotFound
from headrace_frontend.config import FrontendConfig

RESPONSE_ID_CHARACTERS_MAX: Final = 256
# What Python's objects take beside the messages, about.
_ID_BYTES: Final = 500
_CONVERSATION_BYTES: Final = 1_000
_EXPIRY_INTERVAL_S: Final = 1.0
CONVERSATION_KEEP_S: Final = 3_600.0
"""After its last use."""

FindElsewhere: TypeAlias = Callable[[str, str], Awaitable[bytes | None]]
"""Asks other processes for the messages of a tenant's conversation up to an answer."""


async def nowhere(tenant: str, response_id: str) -> bytes | None:
    """For a process without others."""
    return None


@dataclass(slots=True, eq=False)
class _Conversation:
    """`messages` is a serialized Chat. Each answer in it ends at one length. Branches have the `name` of the whole."""

    name: str
    messages: bytearray
    ends: dict[str, int] = field(default_factory=dict)
    used_s: float = 0.0

    @property
    def stored_bytes(self) -> int:
        ids_bytes = sum(_ID_BYTES + len(one) for one in self.ends)
        return sys.getsizeof(self.messages) + ids_bytes + _CONVERSATION_BYTES

    def add(self, response_id: str, added: bytes) -> None:
        self.messages += added
        self.ends[response_id] = len(self.messages)

    def remove(self, response_id: str) -> None:
        del self.ends[response_id]

    def up_to(self, response_id: str) -> bytes:
        return bytes(memoryview(self.messages)[: self.ends[response_id]])

    def use(self, now_s: float) -> None:
        self.used_s = now_s


class _TenantConversations:
    """The conversations of one tenant."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Conversation] = {}
        self._by_use: OrderedDict[_Conversation, None] = OrderedDict()
        """The one that was not used for longest is the first."""
        self.stored_bytes = 0

    def name_of(self, response_id: str) -> str:
        conversation = self._by_id.get(response_id)
        return response_id if conversation is None else conversation.name

    def find(self, response_id: str, now_s: float) -> bytes | None:
        conversation = self._by_id.get(response_id)
        if conversation is None:
            return None
        self._use(conversation, now_s)
        return conversation.up_to(response_id)

    def save(
        self, response_id: str, previous_id: str, earlier: bytes, added: bytes, now_s: float
    ) -> None:
        self._forget(response_id)
        conversation = self._by_id.get(previous_id)
        if conversation is None or conversation.messages != earlier:
            # The first turn, another branch, or a conversation of another process.
            name = self.name_of(previous_id or response_id)
            conversation = _Conversation(name, bytearray(earlier))
        else:
            self.stored_bytes -= conversation.stored_bytes
        conversation.add(response_id, added)
        self.stored_bytes += conversation.stored_bytes
        self._by_id[response_id] = conversation
        self._use(conversation, now_s)

    def drop_oldest(self) -> int:
        """Drops the conversation that was not used for longest. Returns its bytes."""
        before_bytes = self.stored_bytes
        self._drop(next(iter(self._by_use)))
        return before_bytes - self.stored_bytes

    def drop_unused(self, since_s: float) -> None:
        """Drops those that were not used since then."""
        while self._by_use and next(iter(self._by_use)).used_s < since_s:
            self.drop_oldest()

    def _use(self, conversation: _Conversation, now_s: float) -> None:
        conversation.use(now_s)
        self._by_use[conversation] = None
        self._by_use.move_to_end(conversation)

    def _forget(self, response_id: str) -> None:
        """Drops an answer, and its conversation if that has no other."""
        conversation = self._by_id.get(response_id)
        if conversation is None:
            return
        if len(conversation.ends) == 1:
            self._drop(conversation)
            return
        self.stored_bytes -= conversation.stored_bytes
        conversation.remove(response_id)
        self.stored_bytes += conversation.stored_bytes
        del self._by_id[response_id]

    def _drop(self, conversation: _Conversation) -> None:
        self.stored_bytes -= conversation.stored_bytes
        del self._by_use[conversation]
        for response_id in conversation.ends:
            del self._by_id[response_id]


class ConversationStore:
    """The conversations of all tenants, for `keep_s` after their last use. One event loop owns it.

    Without room in `bytes_max`, the tenant with the most bytes loses the conversation that it did not use for longest.
    So none loses one while it has less than its equal share. With 0, nothing is kept.
    """

    def __init__(
        self,
        bytes_max: int,
        keep_s: float,
        find_elsewhere: FindElsewhere = nowhere,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bytes_max = bytes_max
        self._keep_s = keep_s
        self._find_elsewhere = find_elsewhere
        self._clock = clock
        self._tenants: dict[str, _TenantConversations] = {}
        self._expired_s = clock()
        """When the conversations of all tenants were last checked for their time."""

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything."""
        return self._bytes_max > 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of all conversations."""
        return sum(tenant.stored_bytes for tenant in self._tenants.values())

    async def resume(self, tenant: str, response_id: str) -> ContinuedChat:
        """The next turn of the conversation with an answer. An empty id begins one. Raises NotFound.

        Its messages count as if the client had sent them again: see RequestInput.
        """
        if not response_id:
            return ContinuedChat(self, tenant)
        found = self.find_here(tenant, response_id)
        shown_id = response_id[:RESPONSE_ID_CHARACTERS_MAX]
        if found is None and shown_id == response_id:
            found = await self._find_elsewhere(tenant, response_id)
        if found is None:
            raise NotFound(
                f"the conversation of response {shown_id} is not kept any more; send all of its messages",
                metadata={"response_id": shown_id},
            )
        if (sent := current_input()) is not None:
            sent.add(len(found))
        kept = self._tenants.get(tenant)
        name = response_id if kept is None else kept.name_of(response_id)
        return ContinuedChat(self, tenant, name, response_id, found)

    def find_here(self, tenant: str, response_id: str) -> bytes | None:
        """The messages up to an answer and with it, a serialized Chat, if this process has them."""
        now_s = self._clock()
        self._expire(tenant, now_s)
        kept = self._tenants.get(tenant)
        return None if kept is None else kept.find(response_id, now_s)

    def save(
        self, tenant: str, response_id: str, previous_id: str, earlier: bytes, added: bytes
    ) -> None:
        """Keeps `earlier`, the messages up to the answer `previous_id`, and the `added` ones that end with the answer.

        Both are serialized Chats. An answer with an earlier one's id replaces it.
        """
        now_s = self._clock()
        self._expire(tenant, now_s)
        kept = self._tenants.setdefault(tenant, _TenantConversations())
        stored_bytes = self.stored_bytes - kept.stored_bytes
        kept.save(response_id, previous_id, earlier, added, now_s)
        stored_bytes += kept.stored_bytes
        while stored_bytes > self._bytes_max:
            largest = max(self._tenants, key=lambda name: self._tenants[name].stored_bytes)
            stored_bytes -= self._tenants[largest].drop_oldest()
            self._remove_if_empty(largest)

    def _expire(self, tenant: str, now_s: float) -> None:
        """Drops a tenant's conversations that have had their time, and once a second those of all tenants."""
        tenants = [tenant] if tenant in self._tenants else []
        if now_s >= self._expired_s + _EXPIRY_INTERVAL_S:
            self._expired_s = now_s
            tenants = list(self._tenants)
        for name in tenants:
            self._tenants[name].drop_unused(now_s - self._keep_s)
            self._remove_if_empty(name)

    def _remove_if_empty(self, tenant: str) -> None:
        if not self._tenants[tenant].stored_bytes:
            del self._tenants[tenant]


def new_conversation_store(
    config: FrontendConfig, find_elsewhere: FindElsewhere = nowhere
) -> ConversationStore:
    """The store that the settings describe."""
    return ConversationStore(
        config.conversations_mib * 1024**2, CONVERSATION_KEEP_S, find_elsewhere
    )


@dataclass(slots=True)
class ContinuedChat:
    """One turn of a tenant's conversation. `_earlier` has the messages up to the answer `_previous_id`."""

    _store: ConversationStore
    _tenant: str
    name: str = ""
    """The id of the conversation's first answer that is known. Empty for a new one."""
    _previous_id: str = ""
    _earlier: bytes = b""
    _new: bytes = b""

    def complete(self, chat: inference_pb2.Chat, instructions: str = "") -> None:
        """Puts the earlier messages before those of `chat`. The instructions become part of its first message."""
        self._new = _serialized(chat.messages)
        if self._earlier:
            messages = inference_pb2.Chat.FromString(self._earlier + self._new).messages
            del chat.messages[:]
            chat.messages.extend(messages)
        if not instructions:
            return
        # Templates take instructions from the first message only.
        if chat.messages and chat.messages[0].role == "system":
            first = chat.messages[0]
            first.content = f"{instructions}\n\n{first.content}"
        else:
            chat.messages.insert(0, inference_pb2.ChatMessage(role="system", content=instructions))

    def save(self, response_id: str, answer: Iterable[inference_pb2.ChatMessage]) -> None:
        """Keeps the conversation with the answer at its end, without the instructions."""
        added = self._new + _serialized(answer)
        self._store.save(self._tenant, response_id, self._previous_id, self._earlier, added)


def _serialized(messages: Iterable[inference_pb2.ChatMessage]) -> bytes:
    """Serialized Chats that follow each other are the Chat with the messages of all."""
    return inference_pb2.Chat(messages=messages).SerializeToString()

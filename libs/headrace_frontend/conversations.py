"""Conversations that clients continue by the id of an answer, without sending the earlier messages again."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from headrace.inference.v1 import inference_pb2
from headrace_common.callers.bounds import current_input
from headrace_common.errors import NotFound
from headrace_frontend.store import Store, Stored

RESPONSE_ID_CHARACTERS_MAX: Final = 256
MESSAGES: Final = "messages"
"""The operation that returns the messages up to an answer."""
# What Python's objects take beside the messages, about.
_ID_BYTES: Final = 500
_CONVERSATION_BYTES: Final = 1_000


@dataclass(slots=True, eq=False, kw_only=True)
class _Conversation(Stored):
    """`messages` is a serialized Chat. Each answer in it ends at one length. Branches have the `name` of the whole."""

    name: str
    messages: bytearray = field(default_factory=bytearray)

    @property
    def stored_bytes(self) -> int:
        ids_bytes = sum(_ID_BYTES + len(one) for one in self.ids)
        return sys.getsizeof(self.messages) + ids_bytes + _CONVERSATION_BYTES

    def add(self, response_id: str, added: bytes) -> None:
        self.messages += added
        self.ids[response_id] = len(self.messages)

    def up_to(self, response_id: str) -> bytes:
        return bytes(memoryview(self.messages)[: self.ids[response_id]])


class ConversationStore:
    """The conversations in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything."""
        return self._store.keeps

    async def resume(self, tenant: str, response_id: str) -> ContinuedChat:
        """The next turn of the conversation with an answer. An empty id begins one. Raises NotFound.

        Its messages count as if the client had sent them again: see RequestInput.
        """
        if not response_id:
            return ContinuedChat(self, tenant)
        found = self.find_here(tenant, response_id)
        shown_id = response_id[:RESPONSE_ID_CHARACTERS_MAX]
        if found is None and shown_id == response_id:
            found = await self._store.ask_elsewhere(tenant, response_id, MESSAGES, b"")
        if found is None:
            raise NotFound(
                f"the conversation of response {shown_id} is not kept any more; send all of its messages",
                metadata={"response_id": shown_id},
            )
        if (sent := current_input()) is not None:
            sent.add(len(found))
        conversation = self._find(tenant, response_id)
        name = response_id if conversation is None else conversation.name
        return ContinuedChat(self, tenant, name, response_id, found)

    def find_here(self, tenant: str, response_id: str) -> bytes | None:
        """The messages up to an answer and with it, a serialized Chat, if this process has them."""
        conversation = self._find(tenant, response_id)
        return None if conversation is None else conversation.up_to(response_id)

    def save(
        self, tenant: str, response_id: str, previous_id: str, earlier: bytes, added: bytes
    ) -> None:
        """Keeps `earlier`, the messages up to the answer `previous_id`, and the `added` ones that end with the answer.

        Both are serialized Chats. An answer with an earlier one's id replaces it.
        """
        self.remove(tenant, response_id)
        conversation = self._find(tenant, previous_id)
        if conversation is None or conversation.messages != earlier:
            # The first turn, another branch, or a conversation of another process.
            name = previous_id or response_id if conversation is None else conversation.name
            conversation = _Conversation(name=name, messages=bytearray(earlier))
        conversation.add(response_id, added)
        self._store.put(tenant, conversation)

    def remove(self, tenant: str, response_id: str) -> None:
        """No request continues the answer any more."""
        self._store.remove(tenant, _Conversation, response_id)

    def _find(self, tenant: str, response_id: str) -> _Conversation | None:
        return self._store.find(tenant, _Conversation, response_id)


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

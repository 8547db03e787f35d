"""Responses and conversations of /v1/responses that are stored, and what clients do with them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.limits import CHAT_MESSAGES_MAX
from headrace_frontend.conversations import (
    MESSAGES,
    RESPONSE_ID_CHARACTERS_MAX,
    ConversationStore,
)
from headrace_frontend.openai.block_apis.responses_bodies import ItemBody
from headrace_frontend.openai.body import LenientBody, parse_body
from headrace_frontend.store import Store, Stored

PREFIXES: Final = {"responses": "resp_", "conversations": "conv_"}
"""How the ids of entries begin."""
ADDED_ITEMS_MAX: Final = 20
_PAGE_ITEMS_MAX: Final = 100
# What Python's objects take beside the JSON of an entry and of an item, about.
_ENTRY_BYTES: Final = 2_000
_ITEM_BYTES: Final = 250
_EVENT_BYTES: Final = 50
# Of one answer about events. Other routers wait for longer.
_EVENTS_MAX: Final = 1_024
_EVENTS_WAIT_S: Final = 1.0
_METADATA_MAX: Final = 16
_ID_MAX: Final = 256
_ITEM_PREFIXES: Final = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
# An item's id has that of its response, but for the prefix.
_ITEM_ID: Final = re.compile(r"[a-z]+_(.+?)_i?\d+")

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=_METADATA_MAX),
]


class ConversationBody(LenientBody):
    """What a client sets of a conversation. `sent_items` are the items as they were sent."""

    metadata: Metadata = Field(default_factory=dict)
    items: Annotated[list[ItemBody], Field(max_length=ADDED_ITEMS_MAX)] = Field(
        default_factory=list
    )
    sent_items: Any = None

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "sent_items": fields.get("items", [])}


class Arguments(LenientBody):
    """The arguments of an operation. Queries have them as texts."""

    model_config = ConfigDict(strict=False)

    limit: Annotated[int, Field(ge=1, le=_PAGE_ITEMS_MAX)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str = ""
    stream: bool = False
    starting_after: Annotated[int, Field(ge=-1)] = -1
    item_id: str = ""
    items: list[dict[str, Any]] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)


@dataclass(slots=True, eq=False, kw_only=True)
class StoredObject(Stored):
    """A response with the items of its input, or a conversation with its items. All of it is JSON, the items by id."""

    value: bytes
    items: dict[str, bytes]
    ended: bool = False
    """Whether it is no response that still runs."""
    streams: bool = False
    """Whether it has the events of a response that runs in the background."""
    _events: list[bytes] = field(default_factory=list, init=False)
    _stop: Callable[[], None] | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _size: int = field(default=0, init=False)
    """Bytes of items and events."""

    def __post_init__(self) -> None:
        self._size = _bytes_of(self.items)

    @property
    def stored_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.value) + self._size

    def finish(self, value: bytes) -> None:
        """The response has ended so."""
        self.value, self.ended = value, True

    def run_until(self, stop: Callable[[], None]) -> None:
        """The response runs in the background until it has ended, or `stop` is called."""
        self._stop = stop

    def record(self, event: bytes, value: bytes | None = None) -> None:
        """Takes an event, and the response in it if it has one."""
        self.value = value or self.value
        if self.streams:
            self._events.append(event)
            self._size += len(event) + _EVENT_BYTES
            self._notify()

    def close(self) -> None:
        """No event follows."""
        self.ended = True
        self._notify()

    def cancel(self) -> None:
        """Ends a response that runs in the background. Raises InvalidRequest for another one."""
        if self._stop is None:
            remedy = "was not created with background: true; close its connection instead"
            raise InvalidRequest({"id": remedy})
        if not self.ended:
            self.change({"status": "cancelled"})
            self.close()
            self._stop()

    async def events_after(self, number: int) -> bytes:
        """Events after that with this sequence number. Waits for one for a while. Raises InvalidRequest."""
        if not self.streams:
            remedy = "needs a response that was created with background and stream; leave it out"
            raise InvalidRequest({"stream": remedy})
        if len(self._events) <= number + 1 and not self.ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVENTS_WAIT_S):
                    await self._changed.wait()
        found = self._events[number + 1 : number + 1 + _EVENTS_MAX]
        last = number + len(found)
        ended = self.ended and last + 1 >= len(self._events)
        texts = [event.decode() for event in found]
        return json.dumps({"events": texts, "last": last, "ended": ended}).encode()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def change(self, fields: Mapping[str, Any]) -> None:
        """Replaces fields of the object."""
        self.value = json.dumps({**json.loads(self.value), **fields}).encode()

    def add_items(self, items: Mapping[str, bytes]) -> None:
        """Adds items at the end."""
        self.items.update(items)
        self._size = _bytes_of(self.items)

    def remove_item(self, item_id: str) -> None:
        """Raises NotFound."""
        if self.items.pop(item_id, None) is None:
            raise _no_item(item_id)
        self._size = _bytes_of(self.items)

    def item(self, item_id: str) -> bytes:
        """An item of it, or of a response's output. Raises NotFound."""
        if item_id in self.items:
            return self.items[item_id]
        for item in json.loads(self.value).get("output", ()):
            if item["id"] == item_id:
                return json.dumps(item).encode()
        raise _no_item(item_id)

    def end(self) -> None:
        # A request that still runs refers to it.
        self.items.clear()
        self._events.clear()
        self.close()
        if self._stop is not None:
            self._stop()


def _bytes_of(items: Mapping[str, bytes]) -> int:
    return sum(len(item_id) + len(item) + _ITEM_BYTES for item_id, item in items.items())


def _no_item(item_id: str) -> NotFound:
    return NotFound(f"there is no item {item_id[:64]!r}; list the items, or send the item itself")


class StoredObjects:
    """The responses and conversations in a store."""

    def __init__(self, store: Store, conversations: ConversationStore) -> None:
        self._store = store
        self._conversations = conversations

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything."""
        return self._store.keeps

    def put(self, tenant: str, entry: StoredObject) -> None:
        """Keeps a new entry, or one that has changed."""
        self._store.put(tenant, entry)

    def remove(self, tenant: str, entry: StoredObject) -> None:
        """Drops an entry, unless another one has its id."""
        for entry_id in tuple(entry.ids):
            if self._store.find(tenant, StoredObject, entry_id) is entry:
                self._store.remove(tenant, StoredObject, entry_id)

    async def use(self, tenant: str, entry_id: str, operation: str, **arguments: Any) -> bytes:
        """The result of an operation on a tenant's entry, which any process may have. Raises NotFound."""
        found = None
        if len(entry_id) <= RESPONSE_ID_CHARACTERS_MAX:
            sent = json.dumps(arguments).encode()
            found = await self.use_here(tenant, entry_id, operation, sent)
            if found is None:
                found = await self._store.ask_elsewhere(tenant, entry_id, operation, sent)
        if found is None:
            shown_id = entry_id[:RESPONSE_ID_CHARACTERS_MAX]
            raise NotFound(
                f"{shown_id} is not stored: it never was, was deleted, or was not used for an hour, other entries took "
                "its room, or its router has ended; send all items yourself",
                metadata={"id": shown_id},
            )
        return found

    async def use_here(
        self, tenant: str, entry_id: str, operation: str, arguments: bytes
    ) -> bytes | None:
        """As `use`. None when this process does not have the entry."""
        if operation == MESSAGES:
            return self._conversations.find_here(tenant, entry_id)
        entry = self._store.find(tenant, StoredObject, entry_id)
        if entry is None:
            return None
        result = await self._do(
            tenant, entry, entry_id, operation, parse_body(Arguments, arguments)
        )
        if entry.ids:
            self._store.put(tenant, entry)
        return result or entry.value

    async def _do(
        self, tenant: str, entry: StoredObject, entry_id: str, operation: str, given: Arguments
    ) -> bytes | None:
        """The result, None for the object itself."""
        result = None
        match operation:
            case "retrieve":
                pass
            case "items":
                result = _page(entry.items, given)
            case "all":
                result = _listed(entry.items.values())
            case "item":
                result = entry.item(given.item_id)
            case "events":
                result = await entry.events_after(given.starting_after)
            case "cancel":
                entry.cancel()
            case "delete":
                self._store.remove(tenant, StoredObject, entry_id)
                self._conversations.remove(tenant, entry_id)
                result = _deleted(entry_id)
            case "update":
                entry.change({"metadata": given.metadata})
            case "add" | "append":
                added = items_by_id(given.items)
                if operation == "add":
                    # What a response has said is never refused.
                    require_room(len(entry.items) + len(added))
                entry.add_items(added)
                result = _list_object(list(added.values()))
            case "delete_item":
                entry.remove_item(given.item_id)
            case _:
                raise InvalidRequest({"operation": "is unknown to this router; upgrade it"})
        return result


def _deleted(entry_id: str) -> bytes:
    kind = "response" if entry_id.startswith(PREFIXES["responses"]) else "conversation.deleted"
    return json.dumps({"id": entry_id, "object": kind, "deleted": True}).encode()


def _page(items: Mapping[str, bytes], given: Arguments) -> bytes:
    """A part of a list. Raises InvalidRequest."""
    ids = list(items) if given.order == "asc" else list(items)[::-1]
    if given.after and given.after not in items:
        raise InvalidRequest({"after": "is no item of this list; use the last_id of a page"})
    ids = ids[ids.index(given.after) + 1 :] if given.after else ids
    return _list_object([items[one] for one in ids[: given.limit]], len(ids) > given.limit)


def _list_object(items: list[bytes], has_more: bool = False) -> bytes:
    """A list of items as OpenAI has it."""
    first, last = (json.loads(items[place])["id"] if items else "" for place in (0, -1))
    fields = {"object": "list", "first_id": first, "last_id": last, "has_more": has_more}
    return b'%b, "data": %b}' % (json.dumps(fields).encode()[:-1], _listed(items))


def _listed(items: Iterable[bytes]) -> bytes:
    return b"[%b]" % b", ".join(items)


def items_by_id(items: Iterable[Mapping[str, Any]]) -> dict[str, bytes]:
    """Items that have an id."""
    return {item["id"]: json.dumps(item).encode() for item in items}


def stored_items(sent: Any, owner: str) -> dict[str, bytes]:
    """The items of an input as they are stored and listed. Those without an id get one with that of the owner."""
    given = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent or []
    items: dict[str, bytes] = {}
    for number, item in enumerate(given):
        kind = item.get("type") or "message"
        item_id = item.get("id")
        if not isinstance(item_id, str) or not 0 < len(item_id) <= _ID_MAX or item_id in items:
            item_id = f"{_ITEM_PREFIXES.get(kind, 'item')}_{owner}_i{number}"
        sent_fields = {name: value for name, value in item.items() if value is not None}
        fields = {**sent_fields, "id": item_id, "type": kind}
        if kind == "message":
            fields = {"status": "completed", **fields}
            if isinstance(text := item.get("content"), str):
                is_answer = item.get("role") == "assistant"
                part = {"type": "output_text" if is_answer else "input_text", "text": text}
                fields["content"] = [part | ({"annotations": []} if is_answer else {})]
        items[item_id] = json.dumps(fields).encode()
    return items


def response_of_item(item_id: str) -> str:
    """The id of the response that has an item. Empty for what cannot be an item of one."""
    found = _ITEM_ID.fullmatch(item_id)
    return "" if found is None else PREFIXES["responses"] + found[1]


def require_kind(entry_id: str, kind: str) -> None:
    """Raises InvalidRequest for what is no id of a response, or of a conversation."""
    if not entry_id.startswith(PREFIXES[kind]):
        raise InvalidRequest({"id": f"must begin with {PREFIXES[kind]!r}, not {entry_id[:64]!r}"})


def require_room(items: int) -> None:
    """Raises InvalidRequest for a conversation with so many items."""
    if items > CHAT_MESSAGES_MAX:
        remedy = f"has at most {CHAT_MESSAGES_MAX} items; delete some, or create another one"
        raise InvalidRequest({"conversation": remedy})

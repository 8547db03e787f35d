"""Responses and conversations of /v1/responses that are stored, and what clients do with them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from headrace_common.errors import InvalidRequest, NotFound
from headrace_common.limits import CHAT_MESSAGES_MAX
from headrace_frontend.answers import RESPONSE
from headrace_frontend.conversations import (
    MESSAGES,
    RESPONSE_ID_CHARACTERS_MAX,
    ConversationStore,
)
from headrace_frontend.openai.block_apis.responses_bodies import REFERENCE, ItemBody
from headrace_frontend.openai.body import LenientBody, parse_body
from headrace_frontend.store import Store, Stored

PREFIXES: Final = {"responses": RESPONSE, "conversations": "conv_"}
"""How the ids of entries begin."""
ADDED_ITEMS_MAX: Final = 20
_PAGE_ITEMS_MAX: Final = 100
# What Python's objects take beside the JSON of an entry, an item and an event, about.
_ENTRY_BYTES: Final = 2_000
_ITEM_BYTES: Final = 250
_EVENT_BYTES: Final = 50
# Of one answer about events. Other routers wait for longer.
_EVENTS_MAX: Final = 1_024
_EVENTS_WAIT_S: Final = 1.0
_ITEM_PREFIXES: Final = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
# An item's id has that of its response, but for the prefix.
_ITEM_ID: Final = re.compile(r"[a-z]+_(.+?)_i?\d+")

_Name = Annotated[str, Field(max_length=64)]
Metadata = Annotated[
    dict[_Name, Annotated[str, Field(max_length=512)]],
    Field(default_factory=dict, max_length=16),
]


class ConversationBody(LenientBody):
    """What a client sets of a conversation. `sent_items` are the items as they were sent."""

    metadata: Metadata
    items: Annotated[list[ItemBody], Field(default_factory=list, max_length=ADDED_ITEMS_MAX)]
    sent_items: Any = Field(default_factory=list)

    older = frozenset({"items"})

    @classmethod
    def translated(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "sent_items": fields["items"]}

    @model_validator(mode="after")
    def _check(self) -> ConversationBody:
        for index, item in enumerate(self.items):
            if item.is_reference:
                raise ValueError(f"items[{index}].type: {REFERENCE} is no item; send that itself")
        return self


class Arguments(LenientBody):
    """The arguments of an operation. Queries have them as texts. `items` has the JSON of each by its id."""

    model_config = ConfigDict(strict=False)

    limit: Annotated[int, Field(ge=1, le=_PAGE_ITEMS_MAX)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str = ""
    stream: bool = False
    starting_after: Annotated[int, Field(ge=-1)] = -1
    item_id: str = ""
    items: Annotated[dict[str, str], Field(default_factory=dict)]
    metadata: Metadata


@dataclass(slots=True, eq=False, kw_only=True)
class StoredObject(Stored):
    """A response with the items of its input, or a conversation with its items. All is JSON, the items by id."""

    value: str
    items: dict[str, str]
    streams: bool = False
    """Whether it has the events of a response that runs in the background."""
    ended: bool = field(default=False, init=False)
    """Whether it is a response that runs no more."""
    _output: dict[str, str] = field(default_factory=dict, init=False)
    _events: list[str] = field(default_factory=list, init=False)
    _stop: Callable[[], None] | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _items_bytes: int = field(default=0, init=False)
    _events_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._count()

    @property
    def stored_bytes(self) -> int:
        return _ENTRY_BYTES + len(self.value) + self._items_bytes + self._events_bytes

    def set_value(self, value: Mapping[str, Any]) -> None:
        """Replaces the object, and with it the output of a response."""
        self.set_json(*stored_json(value))

    def set_json(self, value: str, output: dict[str, str]) -> None:
        """As `set_value`, with what `stored_json` makes of the object."""
        self.value, self._output = value, output
        self._count()

    def change(self, fields: Mapping[str, Any]) -> None:
        """Replaces fields of the object."""
        self.set_value({**json.loads(self.value), **fields})

    def use_items(self, operation: str, given: Arguments) -> str:
        """The result of an operation on its items. Empty for the object. Raises NotFound and InvalidRequest."""
        result = ""
        match operation:
            case "items":
                result = _page(self.items, given)
            case "all":
                result = _listed({**self.items, **self._output}.values())
            case "add" | "append":
                if operation == "add":
                    # What a response has said is never refused.
                    require_room(len(self.items) + len(given.items))
                self.items.update(given.items)
                result = _list_object(given.items, has_more=False)
            case "item" | "delete_item" if given.item_id not in self.items:
                shown_id = given.item_id[:RESPONSE_ID_CHARACTERS_MAX]
                raise NotFound(f"there is no item {shown_id!r}; list the items")
            case "item":
                result = self.items[given.item_id]
            case "delete_item":
                del self.items[given.item_id]
            case _:
                raise InvalidRequest({"operation": "is unknown to this router; upgrade it"})
        self._count()
        return result

    def run_until(self, stop: Callable[[], None]) -> None:
        """The response runs in the background until it has ended, or `stop` is called."""
        self._stop = stop

    def record(self, event: str) -> None:
        """Takes an event of a response that runs in the background."""
        if self.streams:
            self._events.append(event)
            self._events_bytes += len(event) + _EVENT_BYTES
            self._notify()

    def close(self) -> None:
        """The response has ended."""
        self.ended = True
        if self._stop is not None:
            # The request has its client's key.
            self._stop = _stop_nothing
        self._notify()

    def cancel(self) -> None:
        """Ends a response that runs in the background. Raises InvalidRequest for another one."""
        if self._stop is None:
            remedy = "was not created with background: true; close its connection instead"
            raise InvalidRequest({"id": remedy})
        if not self.ended:
            self.change({"status": "cancelled"})
            self._halt()

    async def events_after(self, number: int) -> dict[str, Any]:
        """The events after that with this sequence number. Waits for one for a while. Raises InvalidRequest."""
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
        return {"events": found, "last": last, "ended": ended}

    def end(self) -> None:
        # A request that still runs refers to it.
        self.items.clear()
        self._events.clear()
        self._halt()

    def _halt(self) -> None:
        stop = self._stop or _stop_nothing
        self.close()
        stop()

    def _count(self) -> None:
        items = (*self.items.items(), *self._output.items())
        self._items_bytes = sum(len(one) + len(item) + _ITEM_BYTES for one, item in items)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _stop_nothing() -> None:
    """For what does not run."""


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
        """Drops an entry, unless it was dropped before."""
        for entry_id in tuple(entry.ids):
            self._store.remove(tenant, StoredObject, entry_id)

    async def use(self, tenant: str, entry_id: str, operation: str, **arguments: Any) -> str:
        """The result of an operation on a tenant's entry, which any process may have: JSON. Raises NotFound."""
        shown_id = entry_id[:RESPONSE_ID_CHARACTERS_MAX]
        given = Arguments(**arguments)
        found = await self._use_here(tenant, entry_id, operation, given)
        if found is None and shown_id == entry_id:
            sent = given.model_dump_json(exclude_unset=True).encode()
            elsewhere = await self._store.ask_elsewhere(tenant, entry_id, operation, sent)
            found = None if elsewhere is None else elsewhere.decode()
        if found is None:
            raise NotFound(
                f"{shown_id} is not stored: it never was, was deleted, or was not used for an hour, other entries took "
                "its room, or its router has ended; send all items yourself",
                metadata={"id": shown_id},
            )
        return found

    async def use_for_others(
        self, tenant: str, entry_id: str, operation: str, arguments: bytes
    ) -> bytes | None:
        """The result of another process's operation. None when this one does not have the entry."""
        if operation == MESSAGES:
            return self._conversations.find_here(tenant, entry_id)
        given = parse_body(Arguments, arguments)
        found = await self._use_here(tenant, entry_id, operation, given)
        return None if found is None else found.encode()

    async def _use_here(
        self, tenant: str, entry_id: str, operation: str, given: Arguments
    ) -> str | None:
        entry = self._store.find(tenant, StoredObject, entry_id)
        if entry is None:
            return None
        result = ""
        match operation:
            case "retrieve":
                pass
            case "update":
                entry.change({"metadata": given.metadata})
            case "events":
                result = json.dumps(await entry.events_after(given.starting_after))
                if not entry.ids:
                    # It was dropped meanwhile.
                    return None
            case "cancel":
                entry.cancel()
            case "delete":
                self._store.remove(tenant, StoredObject, entry_id)
                self._conversations.remove(tenant, entry_id)
                is_response = entry_id.startswith(PREFIXES["responses"])
                kind = "response" if is_response else "conversation.deleted"
                result = json.dumps({"id": entry_id, "object": kind, "deleted": True})
            case _:
                result = entry.use_items(operation, given)
        self._store.put(tenant, entry)
        return result or entry.value


def _page(items: Mapping[str, str], given: Arguments) -> str:
    """A part of a list. Raises InvalidRequest."""
    ids = list(items) if given.order == "asc" else list(items)[::-1]
    if given.after and given.after not in items:
        raise InvalidRequest({"after": "is no item of this list; use the last_id of a page"})
    ids = ids[ids.index(given.after) + 1 :] if given.after else ids
    shown = {one: items[one] for one in ids[: given.limit]}
    return _list_object(shown, has_more=len(ids) > given.limit)


def _list_object(items: Mapping[str, str], *, has_more: bool) -> str:
    """A list of items as OpenAI has it."""
    ids = list(items) or [""]
    fields = {"object": "list", "first_id": ids[0], "last_id": ids[-1], "has_more": has_more}
    return f'{json.dumps(fields)[:-1]}, "data": {_listed(items.values())}}}'


def _listed(items: Iterable[str]) -> str:
    return f"[{', '.join(items)}]"


def stored_json(value: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """An object as JSON, and the items of its output."""
    return json.dumps(value), items_by_id(value.get("output", ()))


def items_by_id(items: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The JSON of items that have an id."""
    return {item["id"]: json.dumps(item) for item in items}


def stored_items(sent: Any, owner: str) -> dict[str, str]:
    """The items of an input as they are stored and listed. Those without an id get one with that of the owner."""
    given = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent or []
    items: dict[str, str] = {}
    for number, item in enumerate(given):
        kind = item.get("type") or "message"
        item_id = item.get("id")
        if kind == REFERENCE and item_id in items:
            continue
        is_id = isinstance(item_id, str) and 0 < len(item_id) <= RESPONSE_ID_CHARACTERS_MAX
        if not is_id or item_id in items:
            item_id = f"{_ITEM_PREFIXES.get(kind, 'item')}_{owner}_i{number}"
        fields = {name: value for name, value in item.items() if value is not None}
        fields |= {"id": item_id, "type": kind}
        if kind == "message":
            fields.setdefault("status", "completed")
            if isinstance(text := item.get("content"), str):
                part: dict[str, Any] = {"type": "input_text", "text": text}
                if item.get("role") == "assistant":
                    part = {"type": "output_text", "text": text, "annotations": []}
                fields["content"] = [part]
        items[item_id] = json.dumps(fields)
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

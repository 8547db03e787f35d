"""Items in the order of their keys."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
Key = tuple[float, ...]


class SortedMap(Generic[T]):
    """Unique keys, each with an item, smallest first.

    Two sorted lists: moving thousands of pointers costs less than a heap's stale entries, and an item's rank is known.
    """

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._items: list[T] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    @property
    def first_key(self) -> Key:
        """The smallest key. There must be one."""
        return self._keys[0]

    @property
    def first(self) -> T:
        """The item with the smallest key. There must be one."""
        return self._items[0]

    def add(self, key: Key, item: T) -> None:
        """Adds an item under a key that is not there yet."""
        index = bisect.bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._items.insert(index, item)

    def remove(self, key: Key) -> None:
        """Drops a key that is there, and its item."""
        index = bisect.bisect_left(self._keys, key)
        del self._keys[index], self._items[index]

    def rank(self, key: Key) -> int:
        """How many keys are smaller."""
        return bisect.bisect_left(self._keys, key)

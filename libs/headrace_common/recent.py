"""A mapping of the last entries."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(OrderedDict[Key, Value]):
    """Keeps the `count` entries that were set last, the oldest first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._count:
            self.popitem(last=False)

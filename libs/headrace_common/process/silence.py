"""Finds peers that should send something and do not, though their connections live."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

# A timer that is later than this shows that this event loop has not run either. Messages may wait in it.
_OWN_DELAY_S: Final = 0.5
_AGAIN_S: Final = 1.0


async def wait_silent(silent_since_s: Callable[[], float | None], limit_s: float) -> float:
    """Returns once a peer has been silent for `limit_s`, and for how long.

    `silent_since_s` gives the time of its latest message, or of the first request after it, by the event loop's clock.
    None: nothing is expected from it now.
    """
    loop = asyncio.get_running_loop()
    wait_s = limit_s
    while True:
        due_s = loop.time() + wait_s
        await asyncio.sleep(wait_s)
        since_s, now_s = silent_since_s(), loop.time()
        if since_s is None:
            wait_s = limit_s
        elif now_s < since_s + limit_s:
            wait_s = since_s + limit_s - now_s
        elif now_s > due_s + _OWN_DELAY_S:
            wait_s = _AGAIN_S
        else:
            return now_s - since_s

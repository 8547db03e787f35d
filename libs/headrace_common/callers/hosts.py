"""The hosts of callers, and how often each caller does something that should be rare."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

# Addresses of which the host is remembered. Clients keep connections, so each has many requests.
_HOSTS_MAX: Final = 4_096


@lru_cache(maxsize=_HOSTS_MAX)
def host_of(address: str) -> str:
    """The host of an IP address. The addresses of one IPv6 network of 64 bits are one host."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        # Such as the path of a Unix socket.
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((ip, 64), strict=False))
        ip = ip.ipv4_mapped
    return str(ip)


def host_of_peer(peer: str) -> str:
    """The host of a peer as gRPC names it, such as "ipv4:10.0.0.7:40112"."""
    address = unquote(peer.partition(":")[2]).rpartition(":")[0]
    return host_of(address.strip("[]"))


CALLERS_MAX: Final = 4_096


class RateByCaller:
    """Permits `per_s` events of each caller, and at first `burst` of them.

    Knows the last `CALLERS_MAX` callers. A forgotten one has its whole burst again.
    """

    def __init__(
        self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Events that no time has paid for yet, and when they were counted."""

    def count(self, caller: str, weight: float = 1.0) -> None:
        """Counts an event as `weight` events, also one beyond the rate."""
        # What exceeds the burst by far would outlast its cause.
        debt = min(self._debt(caller) + weight, 2.0 * self._burst)
        self._debts[caller] = (debt, self._clock())
        self._debts.move_to_end(caller)
        if len(self._debts) > CALLERS_MAX:
            self._debts.popitem(last=False)

    def excess_s(self, caller: str) -> float:
        """Seconds until the caller is within the rate again. 0 while it is."""
        if caller not in self._debts:
            return 0.0
        return max(0.0, (self._debt(caller) - self._burst) / self._per_s)

    def _debt(self, caller: str) -> float:
        debt, at_s = self._debts.get(caller, (0.0, 0.0))
        return max(0.0, debt - (self._clock() - at_s) * self._per_s)

"""The mean wait for a worker of a pool with one queue. Pure."""

from __future__ import annotations

import math

_WORKERS_MAX = 100_000


def mean_wait_s(arrivals_per_s: float, service_s: float, workers: int) -> float:
    """Mean time in the queue of a pool of workers, infinite when they cannot serve all arrivals.

    It is Sakasegawa's approximation of M/M/c: arrivals are random, and so are the times of service, because prompts
    differ in length. (H. Sakasegawa, "An approximation formula Lq = a rho^b / (1 - rho)", 1977.)
    """
    utilization = arrivals_per_s * service_s / workers
    if utilization >= 1.0:
        return math.inf
    power = math.pow(utilization, math.sqrt(2.0 * (workers + 1)) - 1.0)
    return service_s * power / (workers * (1.0 - utilization))


def fewest_workers(arrivals_per_s: float, service_s: float, wait_max_s: float) -> int:
    """The fewest workers with a mean wait of at most `wait_max_s`, which is positive. 0 without arrivals."""
    if arrivals_per_s <= 0.0:
        return 0
    first = math.floor(arrivals_per_s * service_s) + 1
    if first >= _WORKERS_MAX:
        return first
    low, high = first, first
    while high < _WORKERS_MAX and mean_wait_s(arrivals_per_s, service_s, high) > wait_max_s:
        low, high = high + 1, high * 2
    while low < high:
        middle = (low + high) // 2
        if mean_wait_s(arrivals_per_s, service_s, middle) > wait_max_s:
            low = middle + 1
        else:
            high = middle
    return high

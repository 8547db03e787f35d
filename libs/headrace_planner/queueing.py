"""The wait for a worker of a pool with one queue. Pure."""

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


def late_share(arrivals_per_s: float, service_s: float, workers: int, wait_s: float) -> float:
    """The share of arrivals that wait longer than `wait_s` for one of the workers, by Erlang's C formula for M/M/c.

    1 when the workers cannot serve all arrivals.
    """
    load = arrivals_per_s * service_s
    if load >= workers:
        return 1.0
    blocked = 1.0
    for count in range(1, workers + 1):
        blocked = load * blocked / (count + load * blocked)
    waiting = blocked / (1.0 - load / workers * (1.0 - blocked))
    return waiting * math.exp(-(workers - load) * wait_s / service_s)


def fewest_workers(
    arrivals_per_s: float, service_s: float, wait_max_s: float, late_share_max: float = 1.0
) -> int:
    """The fewest workers with a mean wait of at most `wait_max_s`, which is positive. 0 without arrivals.

    At most `late_share_max` of the arrivals wait longer than that.
    """
    if arrivals_per_s <= 0.0:
        return 0

    def enough(workers: int) -> bool:
        return (
            mean_wait_s(arrivals_per_s, service_s, workers) <= wait_max_s
            and late_share(arrivals_per_s, service_s, workers, wait_max_s) <= late_share_max
        )

    first = math.floor(arrivals_per_s * service_s) + 1
    if first >= _WORKERS_MAX:
        return first
    low, high = first, first
    while high < _WORKERS_MAX and not enough(high):
        low, high = high + 1, high * 2
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high

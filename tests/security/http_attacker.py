"""Posts one body over HTTP without a pause: python -m tests.security.http_attacker HOST:PORT PATH KEY SECONDS COUNT.

The body is read from stdin. COUNT connections post it for so many seconds. Then it prints the number of answers by
status as JSON.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Final

_TIMEOUT_S: Final = 60.0


def _post_until(address: str, path: str, key: str, body: bytes, end_s: float) -> Counter[int]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    found: Counter[int] = Counter()
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    while time.monotonic() < end_s:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        response.read()
        found[response.status] += 1
    connection.close()
    return found


def main(address: str, path: str, key: str, seconds: str, count: str) -> None:
    """Posts what stdin has."""
    body = sys.stdin.buffer.read()
    end_s = time.monotonic() + float(seconds)
    found: Counter[int] = Counter()
    with ThreadPoolExecutor(int(count)) as threads:
        for posting in [
            threads.submit(_post_until, address, path, key, body, end_s) for _ in range(int(count))
        ]:
            found.update(posting.result())
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

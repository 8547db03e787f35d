"""A prefill worker that sends wrong digests. Decode sees them as bytes that changed in transit."""

from __future__ import annotations

from typing import Any

from headrace_kv.handoff.checksum import source_digest
from headrace_kv.send import loop
from headrace_prefill.__main__ import main


def _lie(*arguments: Any) -> int:
    return source_digest(*arguments) ^ 1


if __name__ == "__main__":
    vars(loop)["source_digest"] = _lie
    main()

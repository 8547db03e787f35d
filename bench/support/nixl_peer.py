"""vLLM's own NixlConnector, and the bytes that it reads. vLLM loads it in its engine processes.

When reads have ended, it appends a line of JSON to the file in the environment variable `READS_VARIABLE`: the bytes of
each. The class has the name of vLLM's, because vLLM compares it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector as Plain

from bench.support.nixl_pair import READS_VARIABLE


class NixlConnector(Plain):
    """Adds only the bytes."""

    def get_kv_connector_stats(self) -> Any:
        stats = super().get_kv_connector_stats()
        if stats is not None and stats.data["bytes_transferred"]:
            with Path(os.environ[READS_VARIABLE]).open("a") as file:
                file.write(json.dumps(stats.data["bytes_transferred"]) + "\n")
        return stats

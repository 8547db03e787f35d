"""The KV layout of the simulated model, for tests that need any."""

from __future__ import annotations

from headrace_kv.layout import KvLayout

LAYOUT = KvLayout.attention(
    model="sim", dtype="float32", layer_count=4, kv_head_count=2, block_tokens=16, parts={"kv": 64}
)

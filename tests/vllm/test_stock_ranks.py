"""Stock servers with one role each and different numbers of ranks, which are processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ports import free_port
from tests.vllm.pair import LEASE_TTL_S, prompt_of
from tests.vllm.stock import MODEL, Wanted, complete, connector, pairing, serving
from tests.vllm.test_stock import params_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: make model"),
]


async def test_two_ranks_send_to_one_server_that_only_receives(tmp_path: Path) -> None:
    port = free_port()
    prefill = Wanted("prefill", connector("kv_producer", port), port, rank_count=2)
    decode = Wanted("decode", connector("kv_consumer", 0, lease_ttl_s=LEASE_TTL_S))
    async with serving(tmp_path, prefill, decode) as (first, second):
        async with pairing(tmp_path, first, second) as proxy_port:
            for length in (33, 300, 700):
                prompt = prompt_of(length, 7)
                while not (reply := await complete(proxy_port, prompt)).transfer["payload_bytes"]:
                    # Spinning ranks delay a connection beyond its 2 s, and decode computes the prompt.
                    assert "failed to connect" in second.log.read_text()
                    await second.forget()
                assert reply.transfer["transferred_tokens"] == length - 1
                await second.forget()
                assert reply.token_ids == (await second.generate(prompt)).token_ids
        # The roles forbid the other direction, so both compute by themselves.
        prompt = prompt_of(200, 8)
        sends, fetches = params_of(second)
        other = await second.generate(prompt, sends)
        reply = await first.generate(prompt, fetches | {"remote_port": 9})
        assert reply.token_ids == other.token_ids
        assert reply.body["kv_transfer_params"] is other.body["kv_transfer_params"] is None

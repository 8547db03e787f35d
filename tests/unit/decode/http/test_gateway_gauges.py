"""The gauges that Endpoint Pickers scrape from decode workers."""

from __future__ import annotations

import re

from headrace.worker.v1 import worker_pb2
from headrace_decode.admission import Capacity
from headrace_decode.http.door import gateway_gauges

STATUS = worker_pb2.WatchStatusResponse(
    running_requests=3, waiting_requests=1, total_blocks=40, used_blocks=10
)
CAPACITY = Capacity(usable_blocks=39, block_tokens=16, max_model_len=512, max_num_seqs=8)


def test_the_gauges_of_the_model_server_protocol() -> None:
    plain = gateway_gauges(STATUS, CAPACITY, 2, ())
    lines = [line for line in plain.splitlines() if not line.startswith("#")]
    assert lines == [
        "vllm:num_requests_running 3",
        "vllm:num_requests_waiting 3",
        "vllm:kv_cache_usage_perc 0.25",
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="40"} 1',
    ]
    with_adapters = gateway_gauges(STATUS, CAPACITY, 2, ["a", 'b"'])
    assert with_adapters.startswith(plain)
    labels = r'max_lora="2",running_lora_adapters="a,b\"",waiting_lora_adapters=""'
    sample = re.escape(f"vllm:lora_requests_info{{{labels}}} ")
    assert re.fullmatch(rf"{sample}\d+\.\d+", with_adapters.splitlines()[-1])

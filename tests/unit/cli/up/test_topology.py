"""Flags of the processes that `headrace up` starts."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace_cli.commands.up import topology_of
from headrace_cli.up import topology as up_topology
from headrace_cli.up.topology import (
    ProcessSpec,
    Topology,
    check_ports,
    check_topology,
    http_port_of,
    named_model,
    parse_devices,
    planner_spec,
    pool_spec,
    router_spec,
    worker_specs,
)
from headrace_common import ports
from headrace_common.errors import ConfigError

FOLDER = Path("logs")


def flag(spec: ProcessSpec, name: str) -> list[str]:
    return [text for text in spec.arguments if text.startswith(f"--{name}=")]


def test_one_process_per_worker_with_its_own_name_and_files() -> None:
    topology = Topology(engine="sim", prefill_count=2, decode_count=3, decode_tensor_parallel=2)
    specs = worker_specs(topology, FOLDER, "127.0.0.1:7001")
    names = "prefill-0 prefill-1 decode-0 decode-1 decode-2"
    assert [spec.name for spec in specs] == names.split()
    assert len({spec.port_file for spec in specs} | {spec.log_file for spec in specs}) == 10
    assert flag(specs[0], "tensor-parallel-size") == ["--tensor-parallel-size=1"]
    assert flag(specs[2], "tensor-parallel-size") == ["--tensor-parallel-size=2"]


def test_workers_of_both_roles_are_started_beside_or_in_place_of_the_others() -> None:
    topology = topology_of("sim", "sim", (None, None, 2), "1:2", None)
    check_topology(topology)
    specs = worker_specs(topology, FOLDER, "127.0.0.1:7001")
    assert [(spec.service, spec.name) for spec in specs] == [
        ("worker", "worker-0"),
        ("worker", "worker-1"),
    ]
    assert "headrace_worker" in specs[0].arguments
    assert flag(specs[0], "tensor-parallel-size") == ["--tensor-parallel-size=2"]
    mixed = topology_of("sim", "sim", (1, 0, 1), "1", ["worker.max_prompts=8"])
    prefill, worker = worker_specs(mixed, FOLDER, "127.0.0.1:7001")
    assert (prefill.name, worker.name) == ("prefill-0", "worker-0")
    assert flag(worker, "max-prompts") == ["--max-prompts=8"]
    alone = topology_of("sim", "sim", (None, None, 0), "1", None)
    assert [spec.name for spec in worker_specs(alone, FOLDER, "r")] == ["prefill-0", "decode-0"]


def test_a_setting_replaces_the_flag_of_its_service_only() -> None:
    topology = Topology(
        engine="sim",
        settings=(("decode", "max_model_len", "64"), ("router", "listen", "127.0.0.1:9")),
    )
    prefill, decode = worker_specs(topology, FOLDER, "127.0.0.1:7001")
    assert flag(decode, "max-model-len") == ["--max-model-len=64"]
    assert not flag(prefill, "max-model-len")
    router = router_spec(topology, FOLDER, "127.0.0.1:7001")
    assert flag(router, "listen") == ["--listen=127.0.0.1:9"]


def test_flags_of_vllm_reach_every_worker_and_settings_of_one_worker_win() -> None:
    flags = {
        "max_model_len": 4096,
        "dtype": "",
        "quantization": "fp8",
        "enable_lora": True,
        "lora_modules": ["poet=/a/poet", "coder=/a/coder"],
    }
    settings = ["decode.max_model_len=64", "decode.engine_args=--max-loras 2"]
    topology = topology_of("vllm", "./m", (1, 1, 0), "1", settings, flags, served_model_name="chat")
    prefill, decode = worker_specs(topology, FOLDER, "127.0.0.1:7001")
    arguments = "--quantization fp8 --enable-lora --lora-modules poet=/a/poet coder=/a/coder"
    assert flag(prefill, "max-model-len") == ["--max-model-len=4096"]
    assert flag(decode, "max-model-len") == ["--max-model-len=64"]
    assert not flag(prefill, "dtype")
    assert flag(prefill, "engine-args") == [f"--engine-args={arguments}"]
    assert flag(decode, "engine-args") == [f"--engine-args={arguments} --max-loras 2"]
    assert flag(decode, "served-model") == ["--served-model=chat"]
    assert flag(router_spec(topology, FOLDER, "r"), "model") == ["--model=chat=./m"]


def test_without_flags_a_worker_takes_the_models_own_context() -> None:
    topology = topology_of("vllm", "./m", (1, 1, 0), "1", None)
    assert not any(flag(one, "max-model-len") for one in worker_specs(topology, FOLDER, "r"))


def test_http_is_off_unless_a_port_or_a_setting_names_its_address() -> None:
    setting = ("router", "http_listen", "127.0.0.1:8000")
    for topology, address in (
        (Topology(engine="sim"), ""),
        (Topology(engine="sim", http_port=7051), "127.0.0.1:7051"),
        (Topology(engine="sim", settings=(setting,)), "127.0.0.1:8000"),
    ):
        router = router_spec(topology, FOLDER, "127.0.0.1:7001")
        assert [text for text in router.arguments if text.startswith("--http-listen=")][-1] == (
            f"--http-listen={address}"
        )


def test_a_store_of_blocks_is_known_to_every_worker_and_gives_it_main_memory() -> None:
    topology = Topology(engine="sim", pool_gib=1.5, settings=(("prefill", "kv_host_gib", "3"),))
    pool = pool_spec(topology, FOLDER, "127.0.0.1:9")
    assert flag(pool, "listen") == ["--listen=127.0.0.1:9"]
    assert flag(pool, "memory-gib") == ["--memory-gib=1.5"]
    prefill, decode = worker_specs(topology, FOLDER, "127.0.0.1:7001", "127.0.0.1:9")
    for spec in (prefill, decode):
        assert flag(spec, "kv-pool-address") == ["--kv-pool-address=127.0.0.1:9"]
    assert flag(prefill, "kv-host-gib") == ["--kv-host-gib=3"]
    assert flag(decode, "kv-host-gib") == ["--kv-host-gib=0.5"]
    alone = worker_specs(topology, FOLDER, "127.0.0.1:7001")
    assert not [flag(spec, "kv-pool-address") for spec in alone if flag(spec, "kv-pool-address")]


def test_a_planner_publishes_for_the_served_model_and_takes_settings() -> None:
    settings = (("planner", "interval_s", "5"), ("planner", "mode", "advise"))
    topology = Topology(engine="sim", planner=True, settings=settings)
    spec = planner_spec(topology, FOLDER, "127.0.0.1:7001", "127.0.0.1:9")
    assert "headrace_planner_service" in spec.arguments
    assert flag(spec, "model") == ["--model=sim"]
    assert flag(spec, "internal-listen") == ["--internal-listen=127.0.0.1:9"]
    assert flag(spec, "mode") == ["--mode=advise"]
    assert flag(spec, "interval-s") == ["--interval-s=5"]


@pytest.mark.parametrize(
    "topology,remedy",
    [
        (Topology(engine="magic"), "choose vllm or sim"),
        (Topology(), "--model FOLDER"),
        (Topology(engine="sim", model="/models/a"), "--engine sim has no model /models/a"),
        (Topology(model="hf:nowhere"), "hf:OWNER/NAME"),
        (Topology(model="nowhere"), "not a model folder"),
        (Topology(engine="sim", pool_gib=math.inf), "--store-pool inf is no size: give GiB"),
        (Topology(engine="sim", pool_gib=math.nan), "--store-pool nan is no size: give GiB"),
        (Topology(engine="sim", decode_count=0), "--decode 1 or more, or --workers 1 or more"),
        (Topology(engine="sim", decode_count=9, pool_gib=1.0), "--store-pool needs a process"),
        (Topology(engine="sim", decode_count=9, planner=True), "--planner needs a process"),
    ],
)
def test_an_invalid_topology_is_rejected_with_the_remedy(topology: Topology, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        check_topology(topology)


def test_a_model_of_a_hub_is_named_as_on_the_hub_and_every_process_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "here").mkdir(parents=True)
    assert named_model("owner/name") == named_model("hf:owner/name") == "hf:owner/name"
    for folder in ("owner/here", "./owner/name", "/owner/name", "name", "a/b/c"):
        assert named_model(folder) == folder
    topology = Topology(model="hf:owner/name")
    check_topology(topology)
    router = router_spec(topology, FOLDER, "127.0.0.1:7001")
    worker, *_ = worker_specs(topology, FOLDER, "127.0.0.1:7001")
    assert flag(router, "model") == ["--model=owner/name=hf:owner/name"]
    assert flag(worker, "model") == ["--model=hf:owner/name"]
    assert flag(worker, "served-model") == ["--served-model=owner/name"]


def test_http_is_6_above_the_router_unless_another_port_is_given() -> None:
    assert http_port_of(ports.ROUTER, None) == ports.ROUTER_HTTP
    assert http_port_of(8100, None) == 8106
    assert http_port_of(8100, 9000) == 9000
    assert http_port_of(8100, 0) not in (0, 8106)
    assert http_port_of(0, None) not in (0, 6)


def test_a_port_that_cannot_be_had_is_refused_with_its_option() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .* another --port"):
            check_ports(Topology(port=port))
        with pytest.raises(ConfigError, match="another --http-port"):
            check_ports(Topology(port=0, http_port=port))
    with pytest.raises(ConfigError, match="no port is 65536: give a lower --http-port"):
        check_ports(Topology(port=0, http_port=65_536))


def test_each_worker_gets_as_many_devices_as_it_has_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up_topology, "_has_cuda", lambda: True)
    topology = Topology(
        model="hf:owner/name",
        prefill_count=2,
        decode_count=1,
        worker_count=1,
        decode_tensor_parallel=2,
        settings=(("worker", "pipeline_parallel_size", "2"),),
        devices=parse_devices("0, 1,2,3,4,5,GPU-6,7"),
    )
    check_topology(topology)
    specs = worker_specs(topology, FOLDER, "127.0.0.1:7001")
    assert {spec.name: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs} == {
        "prefill-0": "0",
        "prefill-1": "1",
        "decode-0": "2,3",
        "worker-0": "4,5,GPU-6,7",
    }
    without = worker_specs(replace(topology, devices=()), FOLDER, "127.0.0.1:7001")
    assert all("CUDA_VISIBLE_DEVICES" not in spec.environment for spec in without)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"engine": "sim"}, "--devices 0,1 is for --engine vllm"),
        ({"planner": True}, "leave --planner out"),
        ({"devices": ("0", "0")}, "--devices 0,0 names a device twice"),
        ({"decode_count": 2}, "--devices 0,1 names 2 devices, and the ranks of all workers need 3"),
        ({}, "--devices 0,1: this machine has no usable CUDA driver"),
    ],
)
def test_wrong_devices_are_refused_by_the_name_of_the_option(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], remedy: str
) -> None:
    monkeypatch.setattr(up_topology, "_has_cuda", lambda: False)
    given: dict[str, Any] = {"model": "hf:owner/name", "devices": ("0", "1"), **changes}
    with pytest.raises(ConfigError) as caught:
        check_topology(Topology(**given))
    assert remedy in caught.value.detail

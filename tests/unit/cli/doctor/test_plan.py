"""Planned pairs of workers, from their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_cli.doctor.finding import Finding, Verdict
from headrace_cli.doctor.plan import check_plan
from headrace_common.errors import ConfigError

_MODEL = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
}


def worker(folder: Path, name: str, **settings: object) -> Path:
    path = folder / f"{name}.toml"
    values = {"worker_id": name, **settings}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


def model(folder: Path, name: str, **changes: object) -> str:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps({**_MODEL, **changes}))
    return str(folder / name)


def planned(folder: Path, prefill: dict[str, object], decode: dict[str, object]) -> list[Finding]:
    return check_plan(worker(folder, "prefill-0", **prefill), worker(folder, "decode-0", **decode))


def test_workers_that_differ_in_ranks_only_fit(tmp_path: Path) -> None:
    path = model(tmp_path, "m")
    (finding,) = planned(
        tmp_path,
        {
            "model": path,
            "transport": "auto",
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
        },
        {"model": path, "tensor_parallel_size": 1, "engine_args": "--kv-cache-dtype auto"},
    )
    assert finding.verdict is Verdict.OK
    assert "4 layers of bfloat16 fit each other, from ranks 4 to 1" in finding.detail


@pytest.mark.parametrize(
    "changes,field",
    [
        ({"engine_args": "--kv-cache-dtype fp8"}, "dtype"),
        ({"engine_args": ["--kv-cache-dtype=fp8"]}, "dtype"),
        ({"dtype": "float32"}, "dtype"),
        ({"transport": "same_host"}, "transport"),
    ],
)
def test_settings_that_keep_a_pair_apart_are_named(
    tmp_path: Path, changes: dict[str, object], field: str
) -> None:
    path = model(tmp_path, "m")
    (finding,) = planned(tmp_path, {"model": path}, {"model": path, **changes})
    assert finding.verdict is Verdict.ERROR
    assert field in finding.detail
    assert finding.remedy


def test_models_of_another_shape_are_named(tmp_path: Path) -> None:
    paths = model(tmp_path, "m"), model(tmp_path, "n", num_hidden_layers=5)
    settings: list[dict[str, object]] = [{"model": path, "served_model": "one"} for path in paths]
    (finding,) = planned(tmp_path, settings[0], settings[1])
    assert "layers (0-3 != 0-4)" in finding.detail


def test_names_that_differ_or_collide_are_named(tmp_path: Path) -> None:
    path = model(tmp_path, "m")
    found = planned(
        tmp_path,
        {"model": path, "worker_id": "w"},
        {"model": path, "worker_id": "w", "served_model": "other", "engine": "sim"},
    )
    text = " ".join(finding.detail for finding in found)
    assert {finding.verdict for finding in found} == {Verdict.ERROR}
    for part in ("the engine vllm", "two models, m and other", "worker_id w"):
        assert part in text


def test_simulated_workers_fit_by_the_settings_that_both_need(tmp_path: Path) -> None:
    sim: dict[str, object] = {"engine": "sim"}
    (finding,) = planned(
        tmp_path,
        {**sim, "model": "sim:heads=4,layers=3,order=nhd"},
        {**sim, "model": "sim:layers=3,heads=4,stages=2"},
    )
    assert finding.verdict is Verdict.OK
    (finding,) = planned(tmp_path, {**sim, "model": "sim:heads=4"}, {**sim, "model": "sim:heads=8"})
    assert finding.verdict is Verdict.ERROR
    assert "heads=4" in finding.detail


@pytest.mark.parametrize(
    "text,named",
    [
        ("model = [", "not TOML"),
        ("model = 3", "model must be text"),
        ("tensor_parallel_size = 0", "tensor_parallel_size"),
        ("pipeline_parallel_size = 1.5", "pipeline_parallel_size"),
        ('model = "/absent"', "/absent"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        check_plan(path, path)


def test_the_command_prints_the_findings_and_fails_on_an_error(tmp_path: Path) -> None:
    first = worker(tmp_path, "a", engine="sim")
    second = worker(tmp_path, "b", engine="sim")
    ended = CliRunner().invoke(app, ["doctor", "pair", str(first), str(second)])
    assert (ended.exit_code, "planned pair" in ended.output) == (0, True), ended.output
    assert "registry" not in ended.output
    same = CliRunner().invoke(app, ["doctor", "pair", str(first), str(first)])
    assert same.exit_code == 1
    absent = CliRunner().invoke(app, ["doctor", "pair", str(first), str(tmp_path / "absent.toml")])
    assert absent.exit_code == 2

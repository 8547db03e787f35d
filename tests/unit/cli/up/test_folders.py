"""The folder of a deployment: its lock, its state file, and the causes of ends."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any, cast

import pytest

from headrace_cli.state import UpState, find_planner, locked, read_state, write_state
from headrace_cli.up.supervisor import (
    EXIT_MISCONFIGURED,
    Child,
    unexpected_end,
)
from headrace_cli.up.topology import ProcessSpec
from headrace_common.errors import ConfigError, NotFound

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def ended(tmp_path: Path) -> Child:
    """A child that has ended with an empty log, as on a full disk."""
    log = tmp_path / "decode-0.log"
    log.touch()
    spec = ProcessSpec("decode-0", "decode", (), tmp_path / "port", log, {})
    process = type("Ended", (), {"returncode": 1})()
    return Child(spec, cast("Any", process))


def test_a_second_deployment_is_refused_and_names_the_first(tmp_path: Path) -> None:
    with locked(tmp_path, "127.0.0.1:7050"):
        with (
            pytest.raises(ConfigError, match="another deployment uses") as refused,
            locked(tmp_path, "127.0.0.1:1"),
        ):
            raise AssertionError
        assert f"process {os.getpid()}, router 127.0.0.1:7050" in refused.value.detail
        assert "--port" in refused.value.detail
    with locked(tmp_path, "127.0.0.1:7050"):
        pass


def test_a_process_that_ends_on_a_full_disk_names_the_cause(
    ended: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "full" not in unexpected_end(ended).detail
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9, 4096))
    detail = unexpected_end(ended).detail
    assert f"the disk of {ended.spec.log_file.parent} is full, with 4 KiB free" in detail


def test_the_cause_of_an_engine_is_in_the_error(ended: Child) -> None:
    ended.process = cast("Any", type("Ended", (), {"returncode": EXIT_MISCONFIGURED})())
    ended.spec.log_file.write_text(
        "ValueError: an earlier one\n"
        '  File "cpu_worker.py", line 219, in determine_available_memory\n'
        "ValueError: Available memory is less than requested memory for kv (500.0 GiB).\n"
        "headrace-decode: vLLM cannot serve models/m: Engine core initialization failed. See root cause above. "
        "Failed core proc(s): {}; its log above has the cause\n"
    )
    error = unexpected_end(ended)
    assert isinstance(error, ConfigError)
    assert error.detail == (
        "headrace-decode: vLLM cannot serve models/m: Available memory is less than requested memory for kv "
        "(500.0 GiB)."
    )


def test_the_registry_of_a_deployment_here_is_not_that_of_a_router_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "headrace" / "7050"
    folder.mkdir(parents=True)
    write_state(folder, UpState("127.0.0.1:7050", "127.0.0.1:2", 1))
    found = read_state("127.0.0.1:7050")
    assert found is not None
    assert found.registry == "127.0.0.1:2"
    assert read_state("10.0.0.5:7050") is None
    with pytest.raises(NotFound, match="headrace up --planner"):
        find_planner("127.0.0.1:7050")
    write_state(folder, UpState("127.0.0.1:7050", "127.0.0.1:2", 1, "127.0.0.1:3"))
    assert find_planner("127.0.0.1:7050") == "127.0.0.1:3"
    with pytest.raises(NotFound, match="HEADRACE_PLANNER"):
        find_planner("10.0.0.5:7050")

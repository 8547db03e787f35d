"""Wrong ids in the reports of ranks, which would end vLLM's engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_engine.vllm.reported_ids import ReportedIds


def _kept(ids: ReportedIds, *, sent: str = "", received: str = "") -> tuple[str, str]:
    output: Any = SimpleNamespace(finished_sending=set(sent), finished_recving=set(received))
    ids.keep_known(output)
    return "".join(output.finished_sending or ()), "".join(output.finished_recving or ())


def _loading(*names: str) -> ReportedIds:
    ids = ReportedIds()
    for name in names:
        ids.asked(name, loads=True)
        ids.allocated(name, 16)
    return ids


def test_the_end_of_a_load_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    ids = _loading("a")
    assert _kept(ids, received="ax") == ("", "a")
    assert _kept(ids, received="a") == ("", "")
    assert ids.dropped == 2
    assert "2 so far; they are ignored: a" in caplog.text


def test_the_end_of_a_transfer_is_reported_once_and_only_of_held_blocks() -> None:
    ids = ReportedIds()
    ids.finished("a", held=True)
    ids.finished("b", held=False)
    assert _kept(ids, sent="abx") == ("a", "")
    assert _kept(ids, sent="a") == ("", "")


def test_a_request_without_a_load_awaits_no_report() -> None:
    ids = ReportedIds()
    # One that has no blocks yet, one with nothing to load, and one that vLLM computes after all.
    ids.asked("a", loads=True)
    ids.asked("b", loads=False)
    ids.allocated("b", 0)
    ids.asked("c", loads=True)
    ids.allocated("c", 0)
    assert _kept(ids, received="abc") == ("", "")


@pytest.mark.parametrize("first", ["sent", "received"])
def test_a_request_that_ended_while_it_loaded_is_freed_by_the_first_report(first: str) -> None:
    ids = _loading("a")
    ids.finished("a", held=True)
    assert "a" in _kept(ids, **{first: "a"})
    assert _kept(ids, sent="a", received="a") == ("", "")

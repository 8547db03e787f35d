"""Decode workers with wrong clocks are named, with their offset."""

from __future__ import annotations

import logging
import re

import pytest

from tests.kit.router import Rig
from tests.kit.workers import reply
from tests.waiting import until


@pytest.mark.parametrize("offset_s", [-3600.0, 11.0])
async def test_a_warning_names_the_offset_of_a_wrong_clock(
    rig: Rig, caplog: pytest.LogCaptureFixture, offset_s: float
) -> None:
    worker = await rig.add_decode(reply("ok"))
    worker.clock_offset_s = offset_s
    workers, name = rig.router.workers, worker.member.worker_id
    await until(lambda: abs(workers.clock_offsets_s().get(name, 1e9) - offset_s) < 1)
    (warning,) = (r for r in caplog.records if "times in logs are wrong" in r.getMessage())
    found = re.search(r"is ([0-9.]+) s (ahead of|behind) this router's", warning.getMessage())
    assert found, warning.getMessage()
    assert warning.levelno == logging.WARNING
    sign = 1 if found[2] == "ahead of" else -1
    assert sign * float(found[1]) == pytest.approx(offset_s, abs=5)

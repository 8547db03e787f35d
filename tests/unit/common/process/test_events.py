"""The events of a process: their bound, and what an alarm stores."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from unittest.mock import patch

from headrace_common.process.events import (
    EVENT_BYTES,
    EVENTS,
    Alarm,
    EventRing,
    LineStore,
    LogLine,
    event_from_json,
    event_json,
)
from headrace_simulator.incident_file import read_incident


def _reasons(ring: EventRing, begin_ns: int = 0) -> list[str]:
    return [event.reason for *_, event in ring.since(begin_ns) if isinstance(event, Alarm)]


def test_the_oldest_events_make_room_for_new_ones() -> None:
    ring = EventRing(bytes_max=10 * EVENT_BYTES)
    for number in range(15):
        ring.add(Alarm(str(number)))
    assert _reasons(ring) == [str(number) for number in range(5, 15)]
    ring.add(Alarm("large"), 9 * EVENT_BYTES)
    assert _reasons(ring) == ["14", "large"]


def test_an_alarm_stores_what_led_to_it_until_the_next() -> None:
    ring = EventRing(bytes_max=10 * EVENT_BYTES)
    ring.add(Alarm("before"))
    ring.alarm("stalled")
    # What follows within a minute replaces nothing.
    ring.alarm("stalled again")
    for number in range(20):
        ring.add(Alarm(str(number)))
    newest_ns, *_ = ring.since(0)[-1]
    assert _reasons(ring, newest_ns) == ["before", "stalled", "19"]


def test_alarms_are_saved_to_few_files_of_the_owner(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    other = tmp_path / "headrace-w0-1-1700000000.incident"
    other.touch(0o600)
    for second in range(6):
        ring = EventRing()
        ring.save_alarms(tmp_path, "w0")
        ring.add(LogLine("INFO", "l", "before"))
        with patch("time.time_ns", lambda at=second: 10**9 * (1_700_000_000 + at)):
            ring.alarm("stalled")
            for saving in set(threading.enumerate()) - before:
                saving.join()
    files = sorted({*tmp_path.iterdir()} - {other})
    names = [f"headrace-w0-{1_700_000_002 + n}.incident" for n in range(4)]
    assert (other.exists(), [one.name for one in files]) == (True, names)
    assert {one.stat().st_mode & 0o777 for one in files} == {0o600}
    (part,) = read_incident(files[0])["w0"]
    assert [event.kind for event in part.events] == ["LogLine", "Alarm"]


def test_lines_of_the_log_are_events_and_are_cut() -> None:
    log = logging.getLogger("headrace_test.events")
    handler = LineStore()
    log.addHandler(handler)
    try:
        log.warning("worker %s: %s", "w0", "x" * 10_000)
        log.debug("not stored")
    finally:
        log.removeHandler(handler)
    lines = [event for *_, event in EVENTS.since(0) if isinstance(event, LogLine)]
    (line,) = (one for one in lines if one.logger == "headrace_test.events")
    assert line.level == "WARNING"
    assert line.message.startswith("worker w0: xxx")
    assert len(line.message) == 512
    assert event_from_json(LogLine, event_json(line)) == line

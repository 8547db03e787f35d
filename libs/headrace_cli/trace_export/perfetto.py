"""A trace as Chrome's trace events in JSON, which Perfetto and chrome://tracing open. Pure."""

from __future__ import annotations

from typing import Any

from headrace_common.trace_view.model import TraceView


def perfetto_object(view: TraceView) -> dict[str, Any]:
    """Each worker is a process of the document, and each link a thread of the process "links"."""
    threads: dict[tuple[str, str], tuple[int, int]] = {}
    processes: dict[str, int] = {}
    events: list[dict[str, Any]] = []

    def thread(process: str, name: str) -> dict[str, int]:
        if process not in processes:
            processes[process] = len(processes) + 1
            events.append(_name("process_name", processes[process], 0, process))
        number = threads.get((process, name))
        if number is None:
            number = threads[process, name] = processes[process], len(threads) + 1
            events.append(_name("thread_name", *number, name))
        return {"pid": number[0], "tid": number[1]}

    for step in view.steps:
        place = thread(step.worker or step.service or "unknown", f"depth {step.depth}")
        events.append(
            {
                **place,
                **_times(step.start_ns, step.start_ns + step.duration_ns),
                "name": step.label,
                "cat": step.service,
                "args": {"error": step.error} if step.error else {},
            }
        )
    for link in view.links:
        events += [
            {
                **thread("links", link.name),
                **_times(write.submitted_ns, write.landed_ns),
                "name": f"layer {write.layer}",
                "cat": "transfer",
                "args": {
                    "bytes": write.payload_bytes,
                    "ready_us": write.ready_ns / 1e3,
                    "cause": write.cause,
                    "cause_us": write.cause_ns / 1e3,
                },
            }
            for write in link.writes
        ]
    about = {"trace_id": view.trace_id, "request_id": view.request_id}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _times(start_ns: int, end_ns: int) -> dict[str, Any]:
    return {"ph": "X", "ts": start_ns / 1e3, "dur": max(0, end_ns - start_ns) / 1e3}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}

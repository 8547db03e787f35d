"""Tables of route.py. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

Case = tuple[int, str, str]
"""Workers, prompt, and how much of it is cached."""


@dataclass(slots=True)
class Report:
    """Medians by case and way in µs, and ingest in million blocks/s.

    `memory` holds by index the resident bytes per block. Then in µs: a full garbage collection, the longest event, the
    sweep that lists all blocks, and later slices of a sweep.
    """

    ready: dict[Case, dict[str, float]] = field(default_factory=dict)
    whole: dict[Case, dict[str, float]] = field(default_factory=dict)
    ingest: dict[int, dict[str, float]] = field(default_factory=dict)
    memory: dict[str, tuple[float, ...]] = field(default_factory=dict)
    memory_blocks: int = 1 << 20

    def ratios(self, case: Case) -> dict[str, float]:
        """Dynamo's time divided by ours."""
        ready, whole = self.ready[case], self.whole[case]
        if "Dynamo" not in ready:
            return {}
        return {
            "hashes ready": ready["Dynamo"] / ready["ours"],
            "from a list": whole["Dynamo"] / whole["ours, list"],
            "from an array": whole["Dynamo"] / whole["ours, array"],
        }


def lookup_target(case: Case) -> float:
    """The target of Dynamo's time divided by ours, for a lookup."""
    workers, prompt, _ = case
    if workers <= 8:
        return 40.0
    return {"8k": 4.0, "128k": 10.0}.get(prompt, 4.0)


def render(report: Report) -> str:
    """The report in Markdown."""
    lines = ["Lookup with hashes ready, µs", ""]
    lines += _rows(["workers", "prompt", "ours", "Dynamo", "ratio", "target"])
    for case, cells in report.ready.items():
        ratio = report.ratios(case).get("hashes ready")
        lines += _rows(
            [
                str(case[0]),
                f"{case[1]} {case[2]}",
                f"{cells['ours']:.2f}",
                _figure(cells.get("Dynamo"), ".1f"),
                _figure(ratio, ".1f"),
                _against(ratio, lookup_target(case)) if case[2] in {"full", "half"} else "",
            ],
            head=False,
        )
    lines += ["", "Token ids to scores, µs", ""]
    lines += _rows(
        ["workers", "prompt", "ours, list", "ours, array", "Dynamo, list", "ratios", "targets"]
    )
    for case, cells in report.whole.items():
        ratios = report.ratios(case)
        listed, words = ratios.get("from a list"), ratios.get("from an array")
        lines += _rows(
            [
                str(case[0]),
                f"{case[1]} {case[2]}",
                f"{cells['ours, list']:.1f}",
                f"{cells['ours, array']:.1f}",
                _figure(cells.get("Dynamo"), ".1f"),
                f"{_figure(listed, '.2f')}, {_figure(words, '.2f')}",
                f"{_against(listed, 1.0)}, {_against(words, 3.0)}",
            ],
            head=False,
        )
    return "\n".join([*lines, *_ingest_lines(report), *_memory_lines(report), ""])


def _ingest_lines(report: Report) -> list[str]:
    lines = ["", "Ingest of 32-block events from their bytes, million blocks/s", ""]
    lines += _rows(["workers", "ours", "Dynamo", "ratio", "target"])
    for workers, rates in report.ingest.items():
        ratio = rates["ours"] / rates["Dynamo"] if "Dynamo" in rates else None
        lines += _rows(
            [
                str(workers),
                f"{rates['ours']:.2f}",
                _figure(rates.get("Dynamo"), ".2f"),
                _figure(ratio, ".2f"),
                _against(ratio, 1.0),
            ],
            head=False,
        )
    return lines


def _memory_lines(report: Report) -> list[str]:
    lines = ["", f"Memory at {report.memory_blocks:,} blocks, one worker", ""]
    lines += _rows(["index", "resident bytes a block"])
    for name, found in report.memory.items():
        lines += _rows([name, f"{found[0]:.0f}"], head=False)
    _, pause_us, longest_us, first_us, slice_us = report.memory["ours"]
    lines += [
        "",
        (
            "A full garbage collection with these blocks, and the rest of the process frozen, takes "
            f"{pause_us / 1e3:.1f} ms. The longest event, when the table grew, took {longest_us / 1e3:.0f} ms. "
            f"The removal of a worker takes {first_us / 1e3:.1f} ms at once, "
            f"and {slice_us / 1e3:.2f} ms for every 4096 blocks swept later."
        ),
    ]
    return lines


def _rows(cells: list[str], head: bool = True) -> list[str]:
    row = "| " + " | ".join(cells) + " |"
    return [row, "|---" * len(cells) + "|"] if head else [row]


def _figure(value: float | None, form: str) -> str:
    return "not installed" if value is None else format(value, form)


def _against(ratio: float | None, target: float) -> str:
    if ratio is None:
        return ""
    return f"{target:g}: {'met' if ratio >= target else 'missed'}"

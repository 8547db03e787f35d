"""Tables of data_plane.py. Pure."""

from __future__ import annotations

Rates = dict[int, dict[str, float]]
"""GB/s by block bytes and column."""


def table(best: Rates) -> str:
    columns = list(next(iter(best.values())))
    lines = ["| block | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for block, row in best.items():
        cells = " | ".join(f"{row[name]:.2f}" for name in columns)
        lines.append(f"| {block // 1024} KiB | {cells} |")
    return "\n".join(lines)


RATIOS = {
    "mooncake / better raw": ("mooncake", ("raw_mooncake", "raw_mooncake_packed"), 1.0),
    "mooncake / staged": ("mooncake", ("raw_mooncake_staged",), 0.9),
}
"""The column divided by the best of others, and the target at every block size. Staged means 1 MiB writes."""


def ratio_table(best: Rates) -> str:
    present = next(iter(best.values())).keys()
    shown = {
        title: (ours, others, target)
        for title, (ours, others, target) in RATIOS.items()
        if ours in present and all(other in present for other in others)
    }
    heads = [f"{title} (target {target:g})" for title, (_, _, target) in shown.items()]
    lines = ["| block | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for block, row in best.items():
        cells = []
        for ours, others, target in shown.values():
            ratio = row[ours] / max(row[other] for other in others)
            cells.append(f"{ratio:.2f}{'' if ratio >= target else ' below'}")
        lines.append(f"| {block // 1024} KiB | " + " | ".join(cells) + " |")
    return "\n".join(lines)

"""`headrace advise`: whether to disaggregate, how many workers of which role, and what that gains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

from headrace_cli.commands.simulate import run_spec, time_text
from headrace_cli.output import (
    Column,
    Json,
    answer_console,
    command,
    fitted_table,
    option,
    print_json,
)
from headrace_common.errors import ConfigError
from headrace_common.extras import require_extra
from headrace_kv.model_layout import ModelConfig, kv_layout, prompt_bytes
from headrace_planner.settings import WorkerProfile, read_profile
from headrace_simulator.accelerators import (
    ACCELERATORS,
    Accelerator,
    LoadSize,
    accelerator_of,
    computed_profile,
    read_model,
    sent_s_per_byte,
    tensor_parallel_sizes,
    work_of,
)
from headrace_simulator.advice import (
    GOOD_SHARE,
    Fleet,
    Outcome,
    Search,
    Spread,
    busiest,
    made_load,
    reason,
)
from headrace_simulator.settings import SimulationSpec
from headrace_simulator.trace import TraceRequest, read_trace

_SPREAD: Final = "MEAN,DEVIATION"
_TITLES: Final = (
    *("TP", "Devices", "TTFT p50", "p90", "TPOT p50", "p90", "Kept TTFT", "Kept TPOT", "Kept both"),
    "Goodput/s",
)
_COLUMNS: Final = (Column("Workers"), *(Column(title, right=True) for title in _TITLES))


@command(
    "advise",
    "headrace advise --model models/NAME --accelerator H100 --devices 8 --prompt-tokens 4000,2000 --answer-tokens "
    "300,150 --rate 4 --ttft 2 --tpot 0.05   |   "
    "headrace advise --model config.json --accelerator H200 --devices 16 --trace load.jsonl --ttft 2 --tpot 0.05",
)
def advise(  # noqa: PLR0913, PLR0917 - typer makes an option of each
    model: Annotated[Path, option("config.json, or its folder.", metavar="FILE")],
    accelerator: Annotated[str, option(f"{', '.join(ACCELERATORS)}, or a JSON file.")],
    devices: Annotated[int, option("Most of all workers.", min=1, max=1_024)],
    ttft: Annotated[float, option("Bound of TTFT, in seconds.", min=1e-3, max=1e5)],
    tpot: Annotated[float, option("Bound of TPOT, in seconds.", min=1e-4, max=1e5)],
    trace: Annotated[
        Path | None, option("Recorded load.", metavar="FILE", exists=True, dir_okay=False)
    ] = None,
    prompt_tokens: Annotated[str, option("Without a trace.", metavar=_SPREAD)] = "",
    answer_tokens: Annotated[str, option("Without a trace.", metavar=_SPREAD)] = "",
    hit_share: Annotated[float, option("Share that others have.", min=0, max=0.99)] = 0.0,
    rate: Annotated[float, option("Requests/s; 0 as in a trace.", min=0, max=1e6)] = 0.0,
    network_gbit: Annotated[float, option("Of a worker.", min=1e-3, max=1e6)] = 100.0,
    profile: Annotated[
        Path | None, option("Measured, in place of the computed one.", metavar="FILE")
    ] = None,
    ranks: Annotated[
        int, option("Devices of a worker; 0 tries all.", "--tensor-parallel-size", min=0)
    ] = 0,
    as_json: Json = False,
) -> None:
    """Simulates the ways to use some devices for a load, and names the cheapest that keeps the bounds."""
    require_extra("headrace advise", "router")
    config, device = read_model(model), accelerator_of(accelerator)
    load = _load(trace, prompt_tokens, answer_tokens, rate, hit_share)
    size = LoadSize(
        fmean(one.prompt_tokens for one in load),
        fmean(one.answer_tokens for one in load),
        max(one.prompt_tokens + one.answer_tokens for one in load),
    )
    profiles = _profiles(config, device, devices, network_gbit, size)
    if ranks and ranks not in profiles:
        sizes = ", ".join(map(str, profiles))
        raise ConfigError(f"--tensor-parallel-size {ranks} does not start; these do: {sizes}")
    measured = read_profile(profile)
    if measured and not ranks:
        raise ConfigError("give --tensor-parallel-size with --profile: that worker's")
    profiles = {ranks: measured or profiles[ranks]} if ranks else profiles
    with TemporaryDirectory() as folder:
        path = Path(folder) / "load.jsonl"
        path.write_text("".join(one.line() for one in load), encoding="utf-8")

        def simulated(size: int, fleets: Sequence[Fleet]) -> list[dict[str, Any]]:
            runs = tuple(one.settings(ttft, tpot) for one in fleets)
            return run_spec(SimulationSpec(trace=str(path), profile=profiles[size], runs=runs))

        search = Search(simulated)
        best = search.run({size: devices // size for size in profiles})
    found = sorted(search.outcomes.values(), key=lambda one: one.rank)
    chosen = profiles[best.fleet.ranks]
    settings = {
        "tensor_parallel_size": best.fleet.ranks,
        "max_model_len": size.longest_tokens,
        "max_num_batched_tokens": chosen.max_num_batched_tokens,
        "max_num_seqs": chosen.max_num_seqs,
    }
    targets = f"ttft_target={ttft:g}s tpot_target={tpot:g}s"
    start = _start(best.fleet, model, settings, targets, device.machine_devices)
    why = reason(best, found)
    facts = _facts(config, network_gbit, size, chosen)
    if as_json:
        ways = [{**asdict(one.fleet), **one.result} for one in found]
        answer = {"best": ways[0] if best.is_good else None, "reason": why, "start": start}
        print_json({**answer, "ways": ways, "profile": facts})
    else:
        _show(found, best, [facts, why], start)


def _load(
    trace: Path | None, prompt_tokens: str, answer_tokens: str, rate: float, hit_share: float
) -> list[TraceRequest]:
    if trace is not None:
        with trace.open(encoding="utf-8") as lines:
            return busiest(read_trace(lines), rate)
    if not (prompt_tokens and answer_tokens and rate):
        raise ConfigError("give --trace FILE, or --prompt-tokens, --answer-tokens and --rate")
    prompts = Spread.of("--prompt-tokens", prompt_tokens)
    return made_load(prompts, Spread.of("--answer-tokens", answer_tokens), rate, hit_share)


def _profiles(
    config: ModelConfig, device: Accelerator, devices: int, network_gbit: float, size: LoadSize
) -> dict[int, WorkerProfile]:
    """Those of workers that start, by their devices. Raises ConfigError where there are none."""
    longest = f"a request of the load has {size.longest_tokens} tokens"
    context = config.count("max_position_embeddings", default=size.longest_tokens)
    if size.longest_tokens > context:
        raise ConfigError(f"{longest}, and the model {context} of context")
    possible = {
        ranks: computed_profile(config, device, ranks, network_gbit, size)
        for ranks in tensor_parallel_sizes(config, device, devices)
    }
    found = {ranks: one for ranks, one in possible.items() if one is not None}
    if not found:
        gigabytes = 1e-9 * work_of(config).weight_bytes
        raise ConfigError(
            f"the model does not start on up to {max(possible)} {device.name}: its weights have {gigabytes:.0f} GB, "
            f"and {longest}; give more devices, or larger ones"
        )
    return found


def _facts(config: ModelConfig, network_gbit: float, size: LoadSize, profile: WorkerProfile) -> str:
    tokens = round(size.prompt_tokens)
    sent = prompt_bytes(kv_layout(config), tokens)
    sent_ms = 1e3 * sent * sent_s_per_byte(network_gbit)
    return (
        f"The KV of the mean prompt, {tokens} tokens, has {sent / (1 << 20):,.1f} MiB and takes {sent_ms:,.1f} ms at "
        f"{network_gbit:g} Gbit/s. Times of workers: {profile.measured or 'of the file'}."
    )


def _start(
    best: Fleet, model: Path, settings: Mapping[str, int], targets: str, machine_devices: int
) -> list[str]:
    """Commands and Helm values that start the fleet. `headrace up` starts what one machine has devices for."""
    folder = (
        model.parent if model.name == "config.json" else model if model.is_dir() else "OWNER/NAME"
    )
    if best.is_plain:
        flags = (f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
        serve = " ".join(("vllm serve", str(folder), *flags))
        return [f"{serve}   # {best.both} behind a balancer" if best.both > 1 else serve]
    counts = {"prefill": best.prefill, "decode": best.decode, "worker": best.both}
    used = [one for one, count in counts.items() if count]
    options = [f"--{one}s {best.both}" if best.both else f"--{one} {counts[one]}" for one in used]
    options += [f"--set {one}.{name}={value}" for one in used for name, value in settings.items()]
    options.append(f"--devices {','.join(map(str, range(best.devices)))}")
    up = f"headrace up --model {folder} {' '.join(options)}"
    if best.devices > machine_devices:
        up = f"# These are several machines of {machine_devices} devices. Values of the Helm chart start them:"
    resources = {"limits": {"nvidia.com/gpu": best.ranks}}
    helm = {
        one: {"replicas": count, "resources": resources, "settings": dict(settings)}
        for one, count in counts.items()
    }
    return [
        up,
        f"headrace policy set {targets}",
        # YAML has JSON too.
        *(f"{one}: {json.dumps(values)}" for one, values in helm.items()),
    ]


def _show(
    found: Sequence[Outcome], best: Outcome, facts: Sequence[str], start: Sequence[str]
) -> None:
    """The ways with as many devices as the best, and the cheapest good one of each kind."""
    good = {one.fleet.kind: one for one in reversed(found) if one.is_good}.values()
    shown = [one for one in found if one.fleet.devices == best.fleet.devices or one in good]
    console = answer_console()
    rows = [_row(one.fleet, one.result) for one in shown]
    console.print(fitted_table(console, _COLUMNS, rows)[0])
    console.print(
        f"The {'cheapest' if best.is_good else 'nearest'}: {best.fleet.label}, TP {best.fleet.ranks}, "
        f"{best.fleet.devices} devices: {best.share:.1%} of the requests keep both bounds (wanted: {GOOD_SHARE:.0%}).",
        markup=False,
    )
    for line in (*facts, "Start it:", *(f"  {one}" for one in start)):
        console.print(line, markup=False)


def _row(fleet: Fleet, result: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        fleet.label,
        str(fleet.ranks),
        str(fleet.devices),
        *(time_text(result[one], at) for one in ("ttft", "itl") for at in ("p50", "p90")),
        *(f"{result[name]:.1%}" for name in ("ttft_attainment", "itl_attainment", "attainment")),
        f"{result['goodput']:.3g}",
    )

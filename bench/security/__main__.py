"""Measures what attacks cost other clients, and what access control costs every request.

    python -m bench.security [--part bystander|cost|both] [--rounds 3] [--seconds 5] [--attacks NAME,...]
        [--streams 8] [--output bench/results]

"bystander": a client with its own key asks for short answers without a pause. Another client attacks the router with
requests that are rejected. Quiet periods and periods of each attack follow each other in turns. The attacker is a
process that makes its bodies before. It has the priority of an idle process, so that its own work takes no CPU from
the services: an attacker has a machine of its own. The services do their work for it at their usual priority. Ratios
are percentiles of all periods of an attack over those of all quiet ones. Attacker and services share the machine's
CPUs, which the attack alone slows. So the same attack is also made on another idle deployment ("elsewhere"). The ratio
to these periods is what the attack costs beyond CPU of the machine.

"cost": the same requests go through four kinds of deployments in turns: plaintext without roles, with tokens, TLS
without roles, and TLS with roles. Each prompt is prefilled remotely, so all services take part. CPU is that of the
whole deployment, without the client. A ratio compares two kinds in one round, and the table has the median of the
rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Final

from bench.security.bystander import ATTACKS, measure_bystander, render_bystander
from bench.security.cost import measure_cost, render_cost

PARTS: Final = ("bystander", "cost")


def attack_names(text: str) -> tuple[str, ...]:
    """Names of attacks, also with spaces, as the tables have them. Raises ArgumentTypeError for another name."""
    names = tuple(name.strip().replace(" ", "_") for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in ATTACKS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"{', '.join(unknown) or 'nothing'} is no attack: name some of {', '.join(ATTACKS)}"
        )
    return names


def main() -> None:
    """Prints the tables, and writes them to the output folder as security_PART.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=[*PARTS, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each period")
    parser.add_argument(
        "--attacks",
        type=attack_names,
        default=ATTACKS,
        metavar="NAME,...",
        help=f"some of {', '.join(ATTACKS)}",
    )
    parser.add_argument("--streams", type=int, default=8, help="requests at once in cost")
    parser.add_argument("--output", type=Path, help="folder for the tables")
    given = parser.parse_args()
    head = f"{given.rounds} rounds with periods of {given.seconds:g} s, {os.cpu_count()} CPUs for everything."
    for part in PARTS if given.part == "both" else (given.part,):
        if part == "bystander":
            periods = asyncio.run(measure_bystander(given.attacks, given.rounds, given.seconds))
            table = render_bystander(periods)
        else:
            samples = asyncio.run(measure_cost(given.streams, given.rounds, given.seconds))
            table = render_cost(samples)
        text = f"{head} Made by `python -m bench.security --part {part}`.\n\n{table}"
        print(text, flush=True)
        if given.output is not None:
            given.output.mkdir(parents=True, exist_ok=True)
            (given.output / f"security_{part}.md").write_text(text)


if __name__ == "__main__":
    main()

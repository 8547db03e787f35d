"""`headrace pair`: a proxy before two vLLM servers."""

from __future__ import annotations

from typing import Annotated

from headrace_cli.output import command, option
from headrace_common import ports
from headrace_common.extras import require_extra


@command("pair", "headrace pair --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200")
async def pair(
    prefill: Annotated[
        str, option("vLLM server with kv_role kv_producer or kv_both.", metavar="URL")
    ],
    decode: Annotated[
        str, option("vLLM server with kv_role kv_consumer or kv_both.", metavar="URL")
    ],
    pair_address: Annotated[
        str, option("The prefill server's `listen` setting.", metavar="HOST:PORT")
    ] = f"127.0.0.1:{ports.PAIRS}",
    host: Annotated[str, option("Host to listen on.")] = "127.0.0.1",
    port: Annotated[int, option("Port to listen on.", min=0, max=65535)] = ports.PAIR_PROXY,
    timeout: Annotated[float, option("Most seconds of a request.", min=0.001)] = 600.0,
    transfer_timeout: Annotated[
        float, option("Seconds after which decode prefills by itself.", min=0.001)
    ] = 60.0,
) -> None:
    """Joins two vLLM servers that have Headrace's connector; needs no service of Headrace."""

    require_extra("headrace pair", "pair")
    from headrace_cli.pair import PairOptions, run_pair

    await run_pair(
        PairOptions(prefill, decode, pair_address, host, port, timeout, transfer_timeout)
    )

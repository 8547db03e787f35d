"""A deployment over three hosts, and the ports that each reaches: python -m tests.security.transfer_hosts FOLDER.

Needs to own its network namespace. Prints a report as JSON.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from headrace.kv.v1 import layout_pb2
from headrace.registry.v1 import registry_pb2, registry_pb2_grpc
from headrace_cli.client import open_router
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.access.tokens import create_token, new_private_key, public_key_of
from headrace_common.errors import HeadraceError
from headrace_common.rpc.channel import open_channel
from tests.security.other_host import HERE, OtherHost
from tests.suite.deployment import greedy, prompt_of

REGISTRY, ROUTER, DECODE, PREFILL = 7001, 7000, 7100, 7200
_START_S, _END_S, _POLL_S = 60.0, 20.0, 0.1
_ASKS_MAX = 20
_ASK_AGAIN_S = 0.5
_ANSWER_S = 30.0
_LEASE_S = 1.0
_SCRIPT = "from tests.security.transfer_hosts import listening_ports; print(*listening_ports())"
_LISTENS = "0A"


def listening_ports() -> set[int]:
    """The ports of all listening TCP sockets of the network namespace."""
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/self/net", name).read_text(encoding="utf-8").splitlines()[1:]
    ]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == _LISTENS}


class Services:
    """The services, each with a token of its role."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        key = new_private_key()
        self._keys_file = folder / "token_keys.pem"
        self._keys_file.write_bytes(public_key_of(key))
        for role in Role:
            self.token_file(role).write_text(create_token(key, role, "", 600))

    def token_file(self, role: Role) -> Path:
        return self._folder / f"{role}.token"

    @contextmanager
    def run(
        self, role: Role, listen: str, *flags: str, host: OtherHost | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Runs a service, on this host or another, from its readiness to the end of the context."""
        port_file = self._folder / f"{role}.port"
        listens = [f"--internal-listen={listen}"]
        if role is Role.ROUTER:
            listens = [f"--listen={listen}", f"--internal-listen={HERE}:0", "--anonymous-clients"]
        words = [
            *(sys.executable, "-m", f"headrace_{role}", *listens),
            f"--registry={HERE}:{REGISTRY}",
            f"--port-file={port_file}",
            f"--token-file={self.token_file(role)}",
            f"--token-keys-file={self._keys_file}",
            *flags,
        ]
        with (self._folder / f"{role}.log").open("wb") as log:
            command = words if host is None else host.command(*words)
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_for(lambda: port_file.exists() or process.poll() is not None, _START_S)
            assert process.poll() is None, (self._folder / f"{role}.log").read_text()
            yield process
        finally:
            process.kill()
            process.wait(_END_S)

    async def ask(self, seed: int) -> str:
        """The name of the worker that prefilled a request, or the error.

        Decode prefills while no prefill worker pulls. So further requests follow, up to a limit.
        """
        for attempt in range(_ASKS_MAX):
            prefill = await self._ask_once(_ASKS_MAX * seed + attempt)
            if prefill:
                return prefill
            await asyncio.sleep(_ASK_AGAIN_S)
        return ""

    async def _ask_once(self, seed: int) -> str:
        async with open_router(f"{HERE}:{ROUTER}") as router:
            prefill = ""
            try:
                async for response in router.generate(greedy(prompt_of(60, seed), 4), _ANSWER_S):
                    prefill = response.timing.prefill_worker_id or prefill
            except HeadraceError as error:
                return str(error)
        return prefill

    async def memory(self, worker_id: str) -> layout_pb2.RankMemory:
        """What a prefill worker learns of a decode worker's memory."""
        credentials = Credentials(token_file=str(self.token_file(Role.PREFILL)))
        async with open_channel(f"{HERE}:{REGISTRY}", credentials) as channel:
            registry = registry_pb2_grpc.RegistryServiceStub(channel)
            members = await registry.ListMembers(registry_pb2.ListMembersRequest())
            (member,) = [one for one in members.members if one.worker_id == worker_id]
            reference = registry_pb2.MemberRef(worker_id=worker_id, incarnation=member.incarnation)
            answer = await registry.GetKvDescriptor(
                registry_pb2.GetKvDescriptorRequest(member=reference)
            )
        rank: layout_pb2.RankMemory = answer.descriptor.ranks[0]
        return rank


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition comes true in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= end_s:
            return False
        time.sleep(_POLL_S)
    return True


def reached(host: OtherHost, ports: set[int]) -> list[int]:
    return sorted(port for _, port in host.reached([(HERE, port) for port in ports]))


def main(folder: Path) -> None:
    services = Services(folder)
    settings = ("--engine=sim", "--max-num-seqs=4")
    with ExitStack() as stack:
        peer, stranger = OtherHost(0), OtherHost(1)
        stack.callback(peer.close)
        stack.callback(stranger.close)
        run = stack.enter_context
        run(services.run(Role.REGISTRY, f"{HERE}:{REGISTRY}"))
        run(services.run(Role.ROUTER, f"{HERE}:{ROUTER}", "--model=sim"))
        before = listening_ports()
        own = ("--worker-id=decode-0", f"--lease-ttl-s={_LEASE_S}")
        run(services.run(Role.DECODE, f"{HERE}:{DECODE}", *settings, *own))
        kv_ports = listening_ports() - before - {DECODE}
        public = {REGISTRY, ROUTER, DECODE}
        report: dict[str, Any] = {
            "kv_ports": sorted(kv_ports),
            "before": reached(peer, kv_ports),
            "public": reached(stranger, public),
        }
        prefill = run(
            services.run(
                Role.PREFILL,
                f"{peer.address}:{PREFILL}",
                *settings,
                "--worker-id=prefill-0",
                host=peer,
            )
        )
        report["prefilled_by"] = asyncio.run(services.ask(1))
        memory = asyncio.run(services.memory("decode-0"))
        report |= {
            "peer": reached(peer, kv_ports),
            "stranger": reached(stranger, kv_ports | public),
            "write": stranger.write(memory.session, memory.base_address, 4096),
            "prefilled_again_by": asyncio.run(services.ask(2)),
            "prefill_ports": prefill_ports(peer),
        }
        prefill.send_signal(signal.SIGTERM)
        prefill.wait(_END_S)
        wait_for(lambda: not reached(peer, kv_ports), _END_S)
        report["after"] = reached(peer, kv_ports)
        print(json.dumps(report))


def prefill_ports(peer: OtherHost) -> dict[str, list[int]]:
    """The ports of the prefill worker's host, and those that this host reaches."""
    listed = subprocess.run(
        peer.command(sys.executable, "-c", _SCRIPT), capture_output=True, text=True, check=True
    )
    ports = {int(word) for word in listed.stdout.split()}
    return {"all": sorted(ports), "reached": connects_to(peer.address, ports)}


def connects_to(host: str, ports: set[int]) -> list[int]:
    async def connects(port: int) -> bool:
        try:
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def found() -> list[int]:
        results = await asyncio.gather(*map(connects, ports))
        return sorted(port for port, result in zip(ports, results, strict=True) if result)

    return asyncio.run(found())


if __name__ == "__main__":
    main(Path(sys.argv[1]))

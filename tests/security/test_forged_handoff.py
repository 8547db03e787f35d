"""Forged handoffs in a live deployment. The attacker knows the transfer, and claims that its KV has landed.

The prefix of the prompt would stay in the decode worker's cache, for all clients.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.decode.v1 import decode_pb2
from headrace.inference.v1 import inference_pb2, sampling_pb2
from headrace.prefill.v1 import prefill_pb2
from headrace.registry.v1 import registry_pb2
from headrace.worker.v1 import worker_pb2, worker_pb2_grpc
from headrace_cli.client import list_members
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import Role
from headrace_common.access.tokens import create_token, load_local_key
from headrace_common.identity import new_transfer_id
from headrace_common.rpc.channel import open_channel
from headrace_kv.layout.layout import WorkerRef
from headrace_kv.layout.proto import layout_from_proto
from tests.linked_call import LinkedCall
from tests.router_key import RouterKey
from tests.security.bystander import ROOT, bystander
from tests.security.forger import Plan
from tests.security.test_roles import status_of
from tests.suite.deployment import DEADLINE_S, prompt_of, suite

SETTINGS = (("decode", "model", "sim:decode_step_s=0.01"),)
REMOTE = inference_pb2.PREFILL_PLACEMENT_REMOTE
PULL = "/headrace.prefill.v1.PrefillQueueService/Pull"
COUNT = 8
_ATTACK_S = 60.0


async def forge(plan: Plan) -> list[str]:
    """Runs the forger. Returns its lines."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.security.forger", plan.to_json()),
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(_ATTACK_S):
        output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()


class Reservation:
    """A request of another router, which the attacker knows, with reserved blocks. Its prompt is in no queue."""

    def __init__(self, transfer_id: str, reserved: decode_pb2.Reserved, call: LinkedCall) -> None:
        self.transfer_id = transfer_id
        self.reserved = reserved
        self._call = call

    def cancel(self) -> None:
        """Gives the blocks back."""
        self._call.cancel()


@asynccontextmanager
async def reserve(decode: registry_pb2.Member, prompt: list[int]) -> AsyncIterator[Reservation]:
    """As a router with a key of its own."""
    key = RouterKey()
    async with open_channel(decode.endpoint, Credentials(role=Role.ROUTER)) as channel:
        watch = worker_pb2_grpc.WorkerServiceStub(channel).WatchStatus(
            worker_pb2.WatchStatusRequest(ticket_public_key=key.key.public.public_key)
        )
        assert await watch.read()
        request = decode_pb2.GenerateRequest(
            transfer_id=new_transfer_id(),
            incarnation=decode.incarnation,
            token_ids=prompt,
            sampling=sampling_pb2.SamplingParams(max_tokens=COUNT),
            remote_prefill=True,
            ticket_key_id=key.key_id,
        )
        call = LinkedCall(channel, request, DEADLINE_S)
        reserved = (await anext(call)).reserved
        assert reserved.start_token < reserved.end_token
        try:
            yield Reservation(request.transfer_id, reserved, call)
        finally:
            call.cancel()
            watch.cancel()


def plan_of(
    reservation: Reservation, members: Mapping[str, registry_pb2.Member], token: str = ""
) -> Plan:
    """A plan that presents as tickets everything that the attacker has or can make."""
    reserved = reservation.reserved
    decode, prefill = members["decode-0"], members["prefill-0"]
    own = WorkerRef("prefill-9", "9" * 16)
    self_signed = RouterKey().ticket(
        reservation.transfer_id,
        prefill=own,
        decode=WorkerRef(decode.worker_id, decode.incarnation),
        layout=layout_from_proto(decode.layout),
    )
    return Plan(
        endpoint=decode.endpoint,
        token=token,
        worker_id=own.worker_id,
        incarnation=own.incarnation,
        decode_worker_id=decode.worker_id,
        decode_incarnation=decode.incarnation,
        layout=prefill.layout.SerializeToString().hex(),
        transfer_id=reservation.transfer_id,
        start_token=reserved.start_token,
        end_token=reserved.end_token,
        tickets=["", b"no ticket".hex(), self_signed.hex()],
    )


@pytest.mark.core
async def test_no_forged_handoff_changes_an_answer_or_the_prefix_cache(tmp_path: Path) -> None:
    token = create_token(load_local_key(), Role.PREFILL, "prefill-9", 600)
    token_file = tmp_path / "prefill-9.token"
    token_file.write_text(token)
    prompt = prompt_of(100, 7)
    async with suite(tmp_path, prefill_count=1, decode_count=1, settings=SETTINGS) as deployed:
        members = {m.worker_id: m for m in await list_members(deployed.deployment.registry)}
        async with (
            bystander(deployed) as client,
            reserve(members["decode-0"], prompt) as reservation,
        ):
            plan = plan_of(reservation, members)
            # Without a credential.
            assert await forge(plan) == ["UNAUTHENTICATED"]
            async with grpc.aio.insecure_channel(members["router-0"].endpoint) as channel:
                status = await status_of(channel, PULL)
                assert status is grpc.StatusCode.UNAUTHENTICATED
            # With a prefill worker's credential, as the worker that will have the task.
            impostor = replace(plan, token=token, worker_id="prefill-0")
            assert await forge(impostor) == ["PERMISSION_DENIED"]
            prefill = members["prefill-0"]
            hello = prefill_pb2.Hello(
                worker_id="prefill-0", incarnation=prefill.incarnation, layout=prefill.layout
            )
            pull = prefill_pb2.PullRequest(hello=hello).SerializeToString()
            async with open_channel(
                members["router-0"].endpoint, Credentials(token_file=str(token_file))
            ) as channel:
                assert await status_of(channel, PULL, pull) is grpc.StatusCode.PERMISSION_DENIED
            # As itself, with everything that it has in place of a ticket.
            assert await forge(replace(plan, token=token)) == [
                "welcome",
                "cancel UNAUTHENTICATED missing",
                "cancel UNAUTHENTICATED signature",
                "cancel UNAUTHENTICATED key_id",
            ]
            reservation.cancel()
            again = await deployed.generate(prompt, COUNT)
            assert again.token_ids == deployed.expected(prompt, COUNT)
            cached = again.last.usage.decode_cached_tokens
            assert cached == 0, "nothing of the attacked request is in the cache"
            assert client.answers > 0
        await deployed.wait_empty("decode-0")


async def test_a_genuine_ticket_is_of_no_use_to_another_worker_or_for_another_transfer(
    tmp_path: Path,
) -> None:
    """The attacker is a prefill worker that had a task once."""
    token = create_token(load_local_key(), Role.PREFILL, "prefill-9", 600)
    async with suite(tmp_path, prefill_count=1, decode_count=1, settings=SETTINGS) as deployed:
        members = {m.worker_id: m for m in await list_members(deployed.deployment.registry)}
        prefill = members["prefill-0"]
        # It pulls as a worker of its own, and gets the only task that is sent to it.
        own = WorkerRef("prefill-9", "9" * 16)
        token_file = tmp_path / "prefill-9.token"
        token_file.write_text(token)
        async with (
            open_channel(
                members["router-0"].endpoint, Credentials(token_file=str(token_file))
            ) as router,
            reserve(members["decode-0"], prompt_of(100, 8)) as reservation,
        ):
            call: Any = router.stream_stream(
                PULL,
                request_serializer=prefill_pb2.PullRequest.SerializeToString,
                response_deserializer=prefill_pb2.PullResponse.FromString,
            )()
            hello = prefill_pb2.Hello(
                worker_id=own.worker_id,
                incarnation=own.incarnation,
                model=prefill.model,
                layout=prefill.layout,
            )
            await call.write(prefill_pb2.PullRequest(hello=hello))
            await call.write(prefill_pb2.PullRequest(credit=prefill_pb2.Credit(task_count=1)))
            # One of these goes to it: the genuine worker has the others.
            prompts = [prompt_of(80, 100 + number) for number in range(6)]
            asked = [
                asyncio.create_task(deployed.generate(prompt, 2, placement=REMOTE))
                for prompt in prompts
            ]
            task = (await asyncio.wait_for(call.read(), DEADLINE_S)).task
            assert task.handoff_ticket
            plan = plan_of(reservation, members, token)
            plan = replace(plan, tickets=[task.handoff_ticket.hex()])
            assert await forge(plan) == ["welcome", "cancel PERMISSION_DENIED transfer_id"]
            # Its old ticket, after it gave the task back unstarted.
            done = prefill_pb2.TaskDone(transfer_id=task.transfer_id, reason="QUEUE_FULL")
            await call.write(prefill_pb2.PullRequest(done=done))
            for prompt, outcome in zip(prompts, await asyncio.gather(*asked), strict=True):
                assert outcome.token_ids == deployed.expected(prompt, 2)
            ended = replace(plan, transfer_id=task.transfer_id)
            assert (await forge(ended))[1].startswith("cancel CANCELLED")
            call.cancel()
        await deployed.wait_empty("decode-0")

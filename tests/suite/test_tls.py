"""With certificates set, every connection between services is mutual TLS, and other callers are refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace.worker.v1 import worker_pb2
from headrace_cli.client import list_members, open_router, worker_status
from headrace_cli.up.supervisor import Child
from headrace_client import Client
from headrace_common.access.credentials import TlsFiles
from headrace_common.errors import Unauthenticated, WorkerGone
from headrace_common.rpc.channel import open_channel
from tests.suite.certificates import Authority
from tests.suite.deployment import default_model, greedy, prompt_of
from tests.suite.secured import deployed, joined

ANSWER_TOKENS = 6


async def check_answer(channel: grpc.aio.Channel, seed: int) -> None:
    prompt = prompt_of(80, seed)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    responses = [
        response
        async for response in stub.Generate(
            greedy(prompt, ANSWER_TOKENS, inference_pb2.PREFILL_PLACEMENT_REMOTE), timeout=20
        )
    ]
    tokens = tuple(token for response in responses for token in response.token_ids)
    assert tokens == default_model().expected_tokens(prompt, ANSWER_TOKENS)
    # The handoff stream is the connection between workers.
    assert responses[-1].usage.transferred_tokens == 80
    assert responses[-1].timing.prefill_worker_id == "prefill-0"


async def check_client(children: dict[str, Child], tls: TlsFiles) -> None:
    """The client library connects with the files."""
    prompt = prompt_of(80, 3)
    wanted = default_model().expected_tokens(prompt, ANSWER_TOKENS)
    async with Client(children["router"].client_endpoint, tls=tls) as client:
        answer = [
            token
            async for piece in client.generate(
                tokens=prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, timeout_s=20
            )
            for token in piece.token_ids
        ]
        assert answer == list(wanted)


async def check_commands(
    children: dict[str, Child],
    roleless: TlsFiles,
    tls: TlsFiles,
    environment: pytest.MonkeyPatch,
) -> None:
    """The calls of the command line: without files, without a role, and as an operator."""
    registry = children["registry"].endpoint
    with pytest.raises(WorkerGone):
        await list_members(registry)
    for field, path in asdict(roleless).items():
        environment.setenv(f"HEADRACE_{field.upper()}", path)
    with pytest.raises(Unauthenticated, match="needs a role"):
        await list_members(registry)
    for field, path in asdict(tls).items():
        environment.setenv(f"HEADRACE_{field.upper()}", path)
    ids = {member.worker_id for member in await list_members(registry)}
    assert {"prefill-0", "decode-0"} <= ids
    status = await worker_status(children["decode"].endpoint)
    assert status.state == worker_pb2.WatchStatusResponse.STATE_SERVING
    async with open_router(children["router"].client_endpoint) as router:
        assert (await router.listing()).models


async def refused(channel: grpc.aio.Channel) -> bool:
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5
            )
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


@pytest.mark.core
async def test_a_deployment_with_certificates_answers_and_refuses_other_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    ours = authority.sign("operator", "operator")
    client = authority.sign("client")
    forged = stranger.sign("service")
    half = TlsFiles(forged.tls_certificate_file, forged.tls_key_file, ours.tls_authority_file)
    trusting = grpc.ssl_channel_credentials(authority.file.read_bytes())
    async with (
        deployed(tmp_path, authority) as children,
        open_channel(children["router"].client_endpoint, ours) as channel,
    ):
        await joined(channel)
        await check_answer(channel, 1)
        for service, child in children.items():
            for endpoint in filter(None, (child.endpoint, child.client_endpoint)):
                assert await refused(grpc.aio.insecure_channel(endpoint)), service
                assert await refused(grpc.aio.secure_channel(endpoint, trusting)), service
                assert await refused(open_channel(endpoint, half)), service
                assert not await refused(open_channel(endpoint, ours)), service
        await check_answer(channel, 2)
        await check_client(children, client)
        await check_commands(children, client, ours, monkeypatch)


async def ask(endpoint: str, identity: TlsFiles, key: str) -> tuple[int, ...]:
    stub_of = inference_pb2_grpc.InferenceServiceStub
    async with open_channel(endpoint, identity) as channel:
        call = stub_of(channel).Generate(
            greedy(prompt_of(40, 1), ANSWER_TOKENS), timeout=20, metadata=(("x-api-key", key),)
        )
        return tuple([token async for response in call for token in response.token_ids])


async def test_clients_need_no_certificate_where_the_settings_say_so(tmp_path: Path) -> None:
    """The client listener has a certificate of its own, of another authority than the deployment's."""
    internal, public = Authority(tmp_path / "internal"), Authority(tmp_path / "public")
    served = public.sign("web")
    keys = tmp_path / "keys"
    keys.write_text("the-key tenant\n")
    more = tuple(
        ("router", field, value)
        for field, value in (
            ("listen_tls_certificate_file", served.tls_certificate_file),
            ("listen_tls_key_file", served.tls_key_file),
            ("client_certificates", "false"),
        )
    )
    more += (("router", "api_keys_file", str(keys)),)
    anonymous = TlsFiles(tls_authority_file=str(public.file))
    wanted = default_model().expected_tokens(prompt_of(40, 1), ANSWER_TOKENS)
    async with deployed(tmp_path, internal, more) as children:
        router = children["router"]
        async with open_channel(router.client_endpoint, anonymous) as channel:
            await joined(channel, "the-key")
        assert await ask(router.client_endpoint, anonymous, "the-key") == wanted
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(router.client_endpoint, anonymous, "another-key")
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        trusting = TlsFiles(tls_authority_file=str(internal.file))
        for service, child in children.items():
            assert await refused(open_channel(child.endpoint, trusting)), service
            assert await refused(grpc.aio.insecure_channel(child.endpoint)), service
        assert await refused(grpc.aio.insecure_channel(router.client_endpoint))
        # The deployment's authority did not sign the certificate of the client listener.
        assert await refused(open_channel(router.client_endpoint, trusting))

"""The callers of an RPC, by token and by certificate; keys that change; the local key."""

from __future__ import annotations

from pathlib import Path

import jwt
import pytest

from headrace_common import reloading
from headrace_common.access.authorizer import Authorizer, caller_of_certificate
from headrace_common.access.credentials import Credentials
from headrace_common.access.roles import (
    ANONYMOUS,
    PROOF_KEY,
    REGISTRY_AUDIENCE,
    STATUS_AUDIENCE,
    TOKEN_KEY,
    TRUSTED,
    Caller,
    Role,
    caller_with,
)
from headrace_common.access.tokens import (
    FOLDER_VARIABLE,
    HeldToken,
    create_token,
    load_local_key,
    new_private_key,
)
from headrace_common.config import ServiceConfig
from headrace_common.errors import ConfigError, HeadraceError, PermissionDenied, Unauthenticated
from headrace_common.ports import is_loopback

SET_POLICY = "/headrace.registry.v1.RegistryService/SetPolicy"
HEALTH = "/grpc.health.v1.Health/Check"
CLIENTS_ONLY = "/headrace.inference.v1.InferenceService/Generate"
UNKNOWN = "/headrace.registry.v1.RegistryService/Nonsense"


def metadata_of(role: Role | None) -> tuple[tuple[str, str], ...]:
    return Credentials(role=role).metadata_for("127.0.0.1:1")


@pytest.mark.parametrize(
    ("method", "role", "error"),
    [
        (SET_POLICY, Role.OPERATOR, None),
        (SET_POLICY, Role.ROUTER, PermissionDenied),
        (SET_POLICY, None, Unauthenticated),
        (UNKNOWN, Role.OPERATOR, PermissionDenied),
        (UNKNOWN, None, Unauthenticated),
        (HEALTH, None, None),
        (HEALTH, Role.PREFILL, None),
        (CLIENTS_ONLY, Role.OPERATOR, PermissionDenied),
    ],
)
def test_the_table_decides(
    method: str, role: Role | None, error: type[HeadraceError] | None
) -> None:
    authorizer = Authorizer.from_config(ServiceConfig(), ["localhost:1"])
    if error is None:
        caller = authorizer.caller_of_metadata(method, metadata_of(role))
        assert caller == Caller(frozenset(() if role is None else (role,)))
        return
    with pytest.raises(error):
        authorizer.caller_of_metadata(method, metadata_of(role))


def test_a_public_rpc_ignores_a_token_of_another_deployment() -> None:
    authorizer = Authorizer.from_config(ServiceConfig(), ["localhost:1"])
    foreign = ((TOKEN_KEY, create_token(new_private_key(), Role.OPERATOR, "", 60)),)
    assert authorizer.caller_of_metadata(HEALTH, foreign) == ANONYMOUS
    with pytest.raises(Unauthenticated):
        authorizer.caller_of_metadata(SET_POLICY, foreign)


def test_the_token_of_a_status_page_permits_no_rpc() -> None:
    page = Credentials(role=Role.OPERATOR).page_token("127.0.0.1:1")
    status_page = Authorizer.from_config(ServiceConfig(), [STATUS_AUDIENCE])
    service = Authorizer.from_config(ServiceConfig(), ["localhost:1"])
    assert Role.OPERATOR in caller_of(status_page, page).roles
    with pytest.raises(Unauthenticated, match="sent to 'status page'"):
        caller_of(service, page)


def caller_of(receiver: Authorizer, page_token: str) -> Caller:
    found = receiver.caller_of_metadata(SET_POLICY, ((TOKEN_KEY, page_token),))
    assert found is not None
    return found


def test_the_local_key_permits_nothing_where_certificates_decide() -> None:
    authorizer = Authorizer(reads_certificates=True, audiences=["localhost:1"])
    assert authorizer.caller_of_metadata(SET_POLICY, metadata_of(Role.OPERATOR)) is None
    with pytest.raises(Unauthenticated):
        authorizer.caller_of_certificate(SET_POLICY, {})


def test_an_insecure_service_trusts_every_caller() -> None:
    authorizer = Authorizer.from_config(ServiceConfig(insecure=True), ["localhost:1"])
    assert authorizer.caller_of_metadata(SET_POLICY, None) == TRUSTED


@pytest.mark.parametrize(
    ("names", "caller"),
    [
        ([b"spiffe://cluster/headrace/router"], Caller(frozenset({Role.ROUTER}))),
        ([b"spiffe://cluster/headrace/worker/w-0"], caller_with(Role.WORKER, "w-0")),
        (
            [b"127.0.0.1", b"spiffe://cluster/headrace/decode/d-0"],
            Caller(frozenset({Role.DECODE}), "d-0"),
        ),
        ([b"spiffe://other/headrace/router"], ANONYMOUS),
        ([b"spiffe://cluster/headrace/king"], ANONYMOUS),
        ([b"spiffe://cluster/headrace/router", b"spiffe://cluster/headrace/decode"], ANONYMOUS),
        ([b"xspiffe://cluster/headrace/router"], ANONYMOUS),
        ([b"spiffe://cluster/headrace/router/d-0/more"], ANONYMOUS),
        ([], ANONYMOUS),
    ],
)
def test_a_certificate_names_at_most_one_role(names: list[bytes], caller: Caller) -> None:
    context = {"peer_uri": names}
    assert caller_of_certificate(context, "cluster") == caller


def test_a_certificate_decides_where_no_token_is_sent() -> None:
    authorizer = Authorizer(reads_certificates=True)
    assert authorizer.caller_of_metadata(SET_POLICY, ()) is None
    operator = {"peer_uri": [b"spiffe://any/headrace/operator"]}
    router = {"peer_uri": [b"spiffe://any/headrace/router"]}
    assert authorizer.caller_of_certificate(SET_POLICY, operator).roles == {Role.OPERATOR}
    with pytest.raises(PermissionDenied):
        authorizer.caller_of_certificate(SET_POLICY, router)
    with pytest.raises(Unauthenticated):
        authorizer.caller_of_certificate(SET_POLICY, {})


def test_a_key_file_without_keys_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token_keys_file"):
        Authorizer.from_config(ServiceConfig(token_keys_file=str(tmp_path / "missing")))


@pytest.fixture
def local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "credentials"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


def test_the_local_key_is_created_once_and_closed_to_others(local_folder: Path) -> None:
    key = load_local_key()
    assert load_local_key() == key
    assert [path.stat().st_mode & 0o777 for path in (local_folder, *local_folder.iterdir())] == [
        0o700,
        0o600,
    ]


def test_a_local_key_that_others_can_read_is_refused(local_folder: Path) -> None:
    load_local_key()
    (path,) = local_folder.iterdir()
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod"):
        load_local_key()
    path.chmod(0o600)
    local_folder.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod"):
        load_local_key()


def test_a_folder_that_cannot_be_created_names_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/proc/nowhere")
    with pytest.raises(ConfigError, match=FOLDER_VARIABLE):
        load_local_key()


def test_local_tokens_go_to_loopback_addresses_only() -> None:
    credentials = Credentials(role=Role.ROUTER)
    assert credentials.metadata_for("127.0.0.1:7050")
    assert credentials.metadata_for("10.0.0.1:7050") == ()
    assert Credentials().metadata_for("127.0.0.1:7050") == ()


def test_a_proof_is_for_the_address_or_for_the_registry_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(HeldToken.create(new_private_key(), Role.ROUTER).text)

    def audience(credentials: Credentials, endpoint: str, receiver: str = "") -> str:
        (_, (name, proof)) = credentials.metadata_for(endpoint, receiver)
        assert name == PROOF_KEY
        return str(jwt.decode(proof, options={"verify_signature": False})["aud"])

    held, local = Credentials(token_file=str(path)), Credentials(role=Role.ROUTER)
    assert audience(held, "Registry.example:7051", REGISTRY_AUDIENCE) == REGISTRY_AUDIENCE
    # A router named this address to a command.
    assert audience(held, "Registry.example:7051") == "registry.example:7051"
    for endpoint in ("127.0.0.1:7051", "localhost:7051", "[::1]:7051"):
        assert audience(local, endpoint, REGISTRY_AUDIENCE) == "localhost:7051"


def test_a_token_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "CHECK_INTERVAL_S", 0.0)
    path = tmp_path / "token"
    credentials = Credentials(token_file=str(path))
    with pytest.raises(ConfigError, match="token_file"):
        credentials.metadata_for("router:7050")
    path.write_text("first\n")
    assert credentials.metadata_for("router:7050") == ((TOKEN_KEY, "first"),)
    path.write_text("second\n")
    assert credentials.metadata_for("router:7050") == ((TOKEN_KEY, "second"),)
    path.write_text("")
    assert credentials.metadata_for("router:7050") == ((TOKEN_KEY, "second"),)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7050", True),
        ("127.8.0.1", True),
        ("localhost:1", True),
        ("[::1]:7050", True),
        ("::1", True),
        ("0.0.0.0:7050", False),
        ("[::]:7050", False),
        ("10.0.0.1:7050", False),
        ("router:7050", False),
        ("127.0.0.1.example:7050", False),
    ],
)
def test_loopback_addresses(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected

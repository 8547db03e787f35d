"""A Kubernetes API server with its controllers, over etcd, and a fake node. All on loopback."""

from __future__ import annotations

import json
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from kube_tools import HELM, KUBECTL
from tests.component.registry.harness import ETCD, running_etcd
from tests.ports import free_port
from tests.unit.test_architecture import ROOT

PROGRAMS = ROOT / ".cache" / "kube-apiserver"
APISERVER, CONTROLLERS = PROGRAMS / "kube-apiserver", PROGRAMS / "kube-controller-manager"
ADMIN_TOKEN = "admin-of-a-test"
START_S = 120.0
CALL_S = 60.0


@dataclass(frozen=True)
class Cluster:
    """Where the API is, and the files with which tools call it."""

    folder: Path
    url: str
    authority: Path
    kubeconfig: Path

    def api(self) -> httpx2.Client:
        """HTTP with the rights of an administrator."""
        return httpx2.Client(
            base_url=self.url,
            verify=ssl.create_default_context(cafile=str(self.authority)),
            headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
            timeout=CALL_S,
            trust_env=False,
        )

    def kubectl(
        self, *words: str, text: str = "", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        return self._run(KUBECTL, ["--kubeconfig", str(self.kubeconfig), *words], text, check=check)

    def helm(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self._run(HELM, ["--kubeconfig", str(self.kubeconfig), *words], "", check=check)

    def write_kubeconfig(self, name: str, token: str, namespace: str) -> Path:
        """A file with which another user calls the API."""
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(_kubeconfig(self.url, self.authority, token, namespace)))
        return path

    def service_account_token(self, namespace: str, name: str) -> str:
        """A token as the kubelet gives it to the pods of a service account."""
        with self.api() as api:
            answer = api.post(
                f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token",
                json={"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}},
            )
        answer.raise_for_status()
        return str(answer.json()["status"]["token"])

    def _run(
        self, program: Path, words: Sequence[str], text: str, *, check: bool
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(program), *words],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=CALL_S,
            # The folder keeps the caches of the API's descriptions.
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder)},
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done


def _kubeconfig(url: str, authority: Path, token: str, namespace: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [
            {"name": "test", "cluster": {"server": url, "certificate-authority": str(authority)}}
        ],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [
            {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}
        ],
    }


def require_programs() -> None:
    """Skips where a program is missing, and names it."""
    for program, remedy in (
        (APISERVER, "scripts/build_kube_apiserver.sh"),
        (CONTROLLERS, "scripts/build_kube_apiserver.sh"),
        (HELM, "python scripts/kube_tools.py"),
        (KUBECTL, "python scripts/kube_tools.py"),
        (ETCD, "apt-get install etcd-server"),
    ):
        if not Path(program).is_file():
            pytest.skip(f"needs {program}: {remedy}")


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Starts everything, and ends it."""
    key = rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    key_file = folder / "accounts.key"
    key_file.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
    tokens = folder / "tokens.csv"
    tokens.write_text(f"{ADMIN_TOKEN},admin,admin,system:masters\n")
    port = free_port()
    cluster = Cluster(
        folder, f"https://127.0.0.1:{port}", folder / "certs" / "apiserver.crt", folder / "admin"
    )
    cluster.kubeconfig.write_text(
        yaml.safe_dump(_kubeconfig(cluster.url, cluster.authority, ADMIN_TOKEN, "default"))
    )
    data = folder / "etcd"
    data.mkdir()
    with ExitStack() as stack:
        etcd = stack.enter_context(running_etcd(data))
        flags = [
            f"--etcd-servers=http://127.0.0.1:{etcd.port}",
            f"--cert-dir={folder / 'certs'}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            "--service-account-issuer=https://kubernetes.test",
            "--api-audiences=https://kubernetes.test",
            f"--service-account-key-file={key_file}",
            f"--service-account-signing-key-file={key_file}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
        ]
        server = stack.enter_context(_process(folder / "apiserver.log", [str(APISERVER), *flags]))
        _wait_ready(cluster, server, folder / "apiserver.log")
        flags = [
            f"--kubeconfig={cluster.kubeconfig}",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
            "--controllers=deployment,replicaset,statefulset,disruption,garbagecollector,namespace",
        ]
        stack.enter_context(_process(folder / "controllers.log", [str(CONTROLLERS), *flags]))
        yield cluster


@contextmanager
def _process(log: Path, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def _wait_ready(cluster: Cluster, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        assert server.poll() is None, log.read_text(errors="replace")[-2_000:]
        assert time.monotonic() < deadline_s, log.read_text(errors="replace")[-2_000:]
        try:
            with cluster.api() as api:
                if api.get("/readyz").status_code == 200:
                    return
        except (httpx2.HTTPError, OSError):
            # It writes its certificate and then listens.
            pass
        time.sleep(0.1)


def as_list(items: Sequence[Mapping[str, Any]]) -> str:
    """Manifests as one text for kubectl."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(items)})

"""A fake node: it runs the pods of a namespace in name only. What a scheduler and a kubelet report, it reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import httpx2

from tests.kube.cluster import Cluster

NODE = "node-0"
POLL_S = 0.05


class FakeNode(threading.Thread):
    """Binds every pod, makes it ready, and removes it after its deletion.

    Pods in `held` stay as they are: they neither become ready nor end. `log` has what happened, in order. `rounds`
    counts the looks at all pods. `serves` and `has_ended` are asked again and again for a pod that starts or ends, and
    delay it while they return False.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        serves: Callable[[str], bool] = lambda name: True,
        has_ended: Callable[[str], bool] = lambda name: True,
    ) -> None:
        super().__init__(name="fake node", daemon=True)
        self._serves = serves
        self._has_ended = has_ended
        self._api = cluster.api()
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._ending = threading.Event()
        self._addresses = 0
        self.held: set[str] = set()
        self.log: list[str] = []
        self.rounds = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
            self._api.post("/api/v1/nodes", json=node)
            while not self._ending.wait(POLL_S):
                for pod in self._api.get(self._pods).json()["items"]:
                    self._follow(pod)
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 - the test reads it.
            self.failure = error

    def stop(self) -> None:
        self._ending.set()
        self.join(30)
        self._api.close()
        if self.failure is not None:
            raise self.failure

    def _follow(self, pod: Mapping[str, Any]) -> None:
        name = pod["metadata"]["name"]
        path = f"{self._pods}/{name}"
        if "nodeName" not in pod["spec"]:
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}}
            self._expect(self._api.post(f"{path}/binding", json={**binding, "target": target}))
        elif name in self.held:
            return
        elif "deletionTimestamp" in pod["metadata"]:
            if not self._has_ended(name):
                return
            self.log.append(f"{name} ends")
            self._expect(self._api.request("DELETE", path, params={"gracePeriodSeconds": 0}))
        elif pod["status"].get("phase") == "Pending":
            if not self._serves(name):
                return
            self._addresses += 1
            self.log.append(f"{name} serves")
            status = {
                "phase": "Running",
                "podIP": f"10.1.{self._addresses // 250}.{1 + self._addresses % 250}",
                "conditions": [
                    {"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")
                ],
            }
            self._expect(
                self._api.patch(
                    f"{path}/status",
                    json={"status": status},
                    headers={"Content-Type": "application/strategic-merge-patch+json"},
                )
            )

    def _expect(self, answer: httpx2.Response) -> None:
        """Another writer may have been first, or the pod has gone."""
        if answer.status_code not in (404, 409):
            answer.raise_for_status()

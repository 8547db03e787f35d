"""A load that triples and falls: the planner scales StatefulSets. Their pods are simulated workers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.planner.v1 import planner_pb2
from headrace_cli.commands.planner import read_explanation
from tests.kube.cluster import Cluster, as_list
from tests.kube.node import FakeNode
from tests.suite.deployment import Suite, suite
from tests.suite.test_planner import LOOPS, RULES, SETTINGS, STEP_S, Load, counts
from tests.waiting import until

pytest.importorskip("lightkube", reason="needs the extra kubernetes")
pytestmark = [pytest.mark.kube, pytest.mark.timeout(420)]


class Pods:
    """Runs a worker for each pod, by its name. The fake node's thread asks; the event loop acts."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._it: Suite | None = None
        self._work: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.running: set[str] = {"prefill-0", "decode-0"}

    def attach(self, it: Suite) -> None:
        self._it = it

    def serves(self, name: str) -> bool:
        return self._done("start", name)

    def has_ended(self, name: str) -> bool:
        return self._done("end", name)

    def _done(self, what: str, name: str) -> bool:
        return asyncio.run_coroutine_threadsafe(self._poll(what, name), self._loop).result(30)

    async def _poll(self, what: str, name: str) -> bool:
        if (name in self.running) == (what == "start"):
            return True
        if self._it is None:
            return False
        work = self._work.get((what, name))
        if work is None:
            role = name.partition("-")[0]
            action = self._start(name, role) if what == "start" else self._end(name)
            self._work[what, name] = work = asyncio.create_task(action)
        if not work.done():
            return False
        del self._work[what, name]
        work.result()
        return True

    async def _start(self, name: str, role: str) -> None:
        assert self._it is not None
        # A worker of that name may have ended before.
        self._it.child(f"{role}-0").spec.port_file.with_name(f"{name}.port").unlink(missing_ok=True)
        await self._it.add(name, f"{role}-0")
        self.running.add(name)

    async def _end(self, name: str) -> None:
        """As the kubelet: SIGTERM, and the pod stays until its process has ended."""
        assert self._it is not None
        assert await self._it.terminate(name, 60.0) == 0
        self.running.remove(name)


def manifests(namespace: str) -> str:
    """Two StatefulSets with the names of the roles, and the planner's rights on them."""
    items = []
    for role in ("prefill", "decode"):
        labels = {"role": role}
        pod = {"containers": [{"name": role, "image": "none"}]}
        items.append(
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "metadata": {"name": role, "namespace": namespace},
                "spec": {
                    "replicas": 1,
                    "serviceName": role,
                    "podManagementPolicy": "Parallel",
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": pod},
                },
            }
        )
    return as_list(items)


async def test_workers_follow_a_load_that_triples_and_falls(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    rules = tmp_path / "planner.toml"
    rules.write_text(RULES)
    config = {
        "mode": "kubernetes",
        "kubeconfig": str(cluster.kubeconfig),
        "kubernetes_namespace": namespace,
        "kubernetes_prefill": "statefulset/prefill",
        "kubernetes_decode": "statefulset/decode",
        "kubernetes_poll_s": "0.1",
        "settings_file": str(rules),
    }
    settings = (*SETTINGS, *(("planner", name, value) for name, value in config.items()))
    pods = Pods(asyncio.get_running_loop())
    node = FakeNode(cluster, namespace, pods.serves, pods.has_ended)
    cluster.kubectl("apply", "--filename", "-", text=manifests(namespace))
    node.start()
    try:
        async with suite(tmp_path, settings=settings, planner=True) as it:
            pods.attach(it)
            load = Load(it)
            seen: list[tuple[int, int]] = []

            async def reached(prefill: range, decode: range) -> bool:
                seen.append(await counts(it))
                return seen[-1][0] in prefill and seen[-1][1] in decode

            def shown() -> str:
                log = (tmp_path / "planner.log").read_text()[-4_000:]
                return f"{seen[-1:]} {node.log} {node.failure}\n{log}"

            load.set_loops(LOOPS)
            await until(lambda: load.answered >= LOOPS, STEP_S, "the first answers")
            load.set_loops(3 * LOOPS)
            await until(lambda: reached(range(2, 7), range(2, 7)), 2 * STEP_S, shown, 0.05)
            load.set_loops(1)
            await until(lambda: reached(range(1, 2), range(1, 2)), 2 * STEP_S, shown, 0.05)
            explained = await read_explanation(it.deployment.planner, 1_000)
            await load.finish()
            await until(lambda: pods.running == {"prefill-0", "decode-0"}, STEP_S, shown, 0.05)
    finally:
        await asyncio.to_thread(node.stop)
    assert load.failures == []
    assert load.answered > 3 * LOOPS
    assert explained.status.mode == planner_pb2.GetStatusResponse.MODE_KUBERNETES
    outcomes = [decision.outcome for decision in explained.decisions]
    # The workers were added and removed by targets, and each of these was carried out.
    assert outcomes.count(planner_pb2.Decision.OUTCOME_APPLIED) >= 1
    unwanted = {planner_pb2.Decision.OUTCOME_FAILED, planner_pb2.Decision.OUTCOME_EXPIRED}
    assert not unwanted & set(outcomes)
    assert {
        f"{role}-1 {what}" for role in ("prefill", "decode") for what in ("serves", "ends")
    } <= {*node.log}

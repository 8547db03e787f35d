"""`headrace doctor` on a live deployment."""

from __future__ import annotations

from pathlib import Path

from headrace_cli.checks import Verdict
from headrace_cli.commands.doctor import examine
from tests.suite.deployment import suite
from tests.waiting import until

_MEMBERS = {"decode-0", "prefill-0"}


async def test_every_member_of_a_deployment_is_examined(tmp_path: Path) -> None:
    async with suite(tmp_path) as deployed:
        registry = deployed.deployment.registry
        found = {one.subject: one for one in await examine(registry, "")}
        assert found.keys() >= _MEMBERS | {"registry", "local key"}
        assert all(found[name].verdict is Verdict.OK for name in (*_MEMBERS, "registry"))
        with deployed.frozen("prefill-0"):
            (one,) = [one for one in await examine(registry, "") if one.subject == "prefill-0"]
            assert one.verdict is Verdict.ERROR
            assert one.remedy
        deployed.kill("decode-0")

        async def missing() -> bool:
            return any(
                "no worker that generates" in one.detail for one in await examine(registry, "")
            )

        await until(missing, 30.0, "the end of the decode worker", 0.5)

"""The examples that the simulated engine serves. tests/vllm runs the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.examples import run_example
from tests.ports import free_port
from tests.suite.deployment import suite


@pytest.mark.timeout(180)
async def test_a_model_may_call_functions_and_has_conversations(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with suite(tmp_path, settings=(("router", "http_listen", listen),)):
        assert "answers length" in await run_example("tools.py", listen)
        assert "weather {'city': " in await run_example("chat.py", listen)

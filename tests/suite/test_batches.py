"""A batch on a whole deployment goes on after its router was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.suite.test_openai import served
from tests.waiting import until

LINES = 120


def _line(number: int) -> dict[str, Any]:
    body = {"prompt": f"line {number}", "max_tokens": 8, "temperature": 0}
    url = "/v1/completions"
    return {"custom_id": f"{number}", "method": "POST", "url": url, "body": body}


@pytest.mark.core
async def test_a_killed_router_answers_every_line_once(tmp_path: Path) -> None:
    settings = (
        ("router", "batch_folder", str(tmp_path / "batches")),
        ("decode", "model", "sim:decode_step_s=0.005"),
    )
    async with served(tmp_path, *settings) as (it, client):
        lines = "".join(f"{json.dumps(_line(number))}\n" for number in range(LINES))
        file = await client.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        async def has_answers(least: int) -> bool:
            nonlocal batch
            try:
                batch = await client.batches.retrieve(batch.id)
            except openai.APIConnectionError:
                return False
            assert batch.request_counts is not None
            return batch.request_counts.completed >= least

        await until(lambda: has_answers(10), interval_s=0.005)
        router = it.child("router")
        it.kill("router")
        assert batch.status == "in_progress"
        await it.restart_killed(router)
        await until(lambda: has_answers(LINES))
        await until(lambda: _has_ended(client, batch.id))
        batch = await client.batches.retrieve(batch.id)
        assert (batch.status, batch.error_file_id) == ("completed", None)
        assert batch.output_file_id is not None
        content = (await client.files.content(batch.output_file_id)).text
        answers = [json.loads(one) for one in content.splitlines()]
        assert sorted(int(one["custom_id"]) for one in answers) == list(range(LINES))
        answer = await client.completions.create(model="sim", **_line(7)["body"])
        texts = {one["custom_id"]: one["response"]["body"]["choices"][0] for one in answers}
        assert texts["7"]["text"] == answer.choices[0].text


async def _has_ended(client: openai.AsyncOpenAI, batch_id: str) -> bool:
    return (await client.batches.retrieve(batch_id)).status == "completed"

"""Agents of Pydantic AI with a tool and a form of their answer: python pydantic_ai_agents.py http://HOST:PORT NOTE"""

import asyncio
import json
import sys
from typing import Any

import openai
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, NOTE = sys.argv[1:]
QUESTION = "What does my note say?"


class Report(BaseModel):
    """The form of the answer."""

    note: str
    words: int


def read_note() -> str:
    """Reads the note."""
    return NOTE


async def main() -> dict[str, Any]:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=30)
    provider = OpenAIProvider(openai_client=client)
    found = {}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        for form in (NativeOutput, ToolOutput, PromptedOutput):
            model = kind("sim", provider=provider)
            agent = Agent(model, output_type=form(Report), tools=[read_note])
            result = await agent.run(QUESTION)
            async with agent.run_stream(QUESTION) as stream:
                last = await stream.get_output()
            found[f"{kind.__name__} {form.__name__}"] = [result.output.note, last.note]
    return found


print(json.dumps(asyncio.run(main())))

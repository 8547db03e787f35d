"""An agent of OpenAI's Agents SDK with a tool and a form: python openai_agents.py http://HOST:PORT NOTE"""

import asyncio
import json
import sys
from typing import Any

import agents
import openai
from pydantic import BaseModel

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
    found: dict[str, Any] = {}
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        agent: Any = agents.Agent(
            name="reader",
            instructions="You read notes.",
            tools=[agents.function_tool(read_note)],
            output_type=Report,
            model=kind("sim", client),
        )
        first = await agents.Runner.run(agent, QUESTION)
        history = [*first.to_input_list(), {"role": "user", "content": "Again"}]
        again = await agents.Runner.run(agent, history)
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        found[kind.__name__] = [
            (len(run.raw_responses), run.final_output.note) for run in (first, again, streamed)
        ]
        if kind is agents.OpenAIResponsesModel:
            previous = first.last_response_id
            last = await agents.Runner.run(agent, "Again", previous_response_id=previous)
            found["previous"] = last.final_output.note
            conversation = await client.conversations.create()
            for question in (QUESTION, "Again"):
                last = await agents.Runner.run(agent, question, conversation_id=conversation.id)
            items = await client.conversations.items.list(conversation.id)
            found["conversation"] = [last.final_output.note, len(items.data)]
    return found


agents.set_tracing_disabled(True)
print(json.dumps(asyncio.run(main())))

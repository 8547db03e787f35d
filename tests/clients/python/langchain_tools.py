"""LangChain's bind_tools with a form of the answer: python langchain_tools.py http://HOST:PORT NOTE"""

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, NOTE = sys.argv[1:]


class Report(BaseModel):
    """The form of the answer."""

    note: str
    words: int


def read_note() -> str:
    """Reads the note."""
    return NOTE


found = {}
for is_responses in (False, True):
    model = ChatOpenAI(
        base_url=f"{URL}/v1",
        api_key="none",
        model="sim",
        max_retries=0,
        timeout=30,
        use_responses_api=is_responses,
    )
    bound = model.bind_tools([read_note], response_format=Report, strict=True)
    messages: list[Any] = [HumanMessage("What does my note say?")]
    called = bound.invoke(messages)
    messages += [called, ToolMessage(NOTE, tool_call_id=called.tool_calls[0]["id"])]
    answer = bound.invoke(messages).additional_kwargs["parsed"]
    streamed = "".join(chunk.text for chunk in bound.stream(messages))
    api = "responses" if is_responses else "chat"
    found[api] = [called.tool_calls[0]["name"], answer.note, json.loads(streamed)["note"]]
print(json.dumps(found))

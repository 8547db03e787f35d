"""Uses a Headrace router through LangChain: python langchain_chat.py http://HOST:PORT"""

import json
import sys
from typing import Literal

from langchain_openai import ChatOpenAI


def f(a: Literal["b"]) -> str:
    """A tool."""
    return a


model = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1",
    api_key="none",
    model="sim",
    max_tokens=16,
    temperature=0,
    max_retries=0,
    timeout=30,
)
chat = model.invoke("Hello")
streamed = "".join(chunk.text for chunk in model.stream("Hello"))
called = model.bind_tools([f], tool_choice="f").invoke("Hello")
found = {
    "chat": bool(chat.text) and chat.usage_metadata["output_tokens"] == 16,
    "stream": streamed == chat.text,
    "tool": called.tool_calls[0]["args"],
}
print(json.dumps(found))

"""Uses a Headrace router through Anthropic's library: python anthropic_sdk.py http://HOST:PORT"""

import json
import sys
from typing import Any

import anthropic

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
TOOL = {
    "name": "f",
    "input_schema": {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]},
}

client: Any = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=30)
chat = client.messages.create(model="sim", messages=MESSAGES, max_tokens=8)
with client.messages.stream(model="sim", messages=MESSAGES, max_tokens=8) as stream:
    streamed = stream.get_final_message()
called = client.messages.create(
    model="sim",
    messages=MESSAGES,
    max_tokens=16,
    tools=[TOOL],
    tool_choice={"type": "tool", "name": "f"},
)
count = client.messages.count_tokens(model="sim", messages=MESSAGES)
try:
    client.messages.create(
        model="sim", messages=[{"role": "user", "content": "x" * 20_000}], max_tokens=8
    )
    too_long = None
except anthropic.BadRequestError as error:
    too_long = error.type
found = {
    "chat": bool(chat.content[0].text) and chat.usage.output_tokens == 8,
    "stream": streamed.usage.output_tokens == 8 and streamed.stop_reason == "max_tokens",
    "tool": called.content[-1].input,
    "count": count.input_tokens == chat.usage.input_tokens,
    "too long": too_long,
}
print(json.dumps(found))

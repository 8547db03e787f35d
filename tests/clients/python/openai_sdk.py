"""Uses a Headrace router through OpenAI's library: python openai_sdk.py http://HOST:PORT"""

import json
import sys
from typing import Any

import openai

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
FUNCTION: Any = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]},
}

client: Any = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=30)
chat = client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8, temperature=0)
chunks = client.chat.completions.create(
    model="sim", messages=MESSAGES, max_tokens=8, temperature=0, stream=True
)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
called = client.chat.completions.create(
    model="sim",
    messages=MESSAGES,
    max_tokens=16,
    tools=[{"type": "function", "function": FUNCTION}],
    tool_choice={"type": "function", "function": {"name": "f"}},
)
response = client.responses.create(
    model="sim", input="Hello", max_output_tokens=8, temperature=0, store=False
)
try:
    client.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "x" * 20_000}], max_tokens=8
    )
    too_long = None
except openai.BadRequestError as error:
    too_long = error.code
text = chat.choices[0].message.content
found = {
    "chat": bool(text) and chat.usage.completion_tokens == 8,
    "stream": streamed == text,
    "tool": json.loads(called.choices[0].message.tool_calls[0].function.arguments),
    "responses": response.output_text == text,
    "too long": too_long,
}
print(json.dumps(found))

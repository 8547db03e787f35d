"""A chat over OpenAI's API: streamed, continued by its id, and with a function that the model must call.

    python examples/chat.py [BASE_URL]

`make up` serves http://127.0.0.1:7056/v1. It needs the package openai.
"""

import json
import sys

import openai

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7056/v1"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}},
            "required": ["city"],
        },
    },
}


def main() -> None:
    """Prints the answers."""
    client = openai.OpenAI(base_url=URL, api_key="none")
    model = client.models.list().data[0].id

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=24,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    first = client.responses.create(model=model, input="My name is Ada.", max_output_tokens=16)
    second = client.responses.create(
        model=model,
        input="What is my name?",
        previous_response_id=first.id,
        max_output_tokens=16,
    )
    print(second.output_text)

    called = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=64,
    )
    for call in called.choices[0].message.tool_calls or ():
        print(call.function.name, json.loads(call.function.arguments))


if __name__ == "__main__":
    main()

"""A model that calls a function when it wants to, and gets the result: tool_choice is auto.

    python examples/tools.py [BASE_URL]

`make up` serves http://127.0.0.1:7056/v1. It needs the package openai.
"""

import json
import sys

import openai

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7056/v1"
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time of a city, as HH:MM.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def main() -> None:
    """Asks until the answer has no calls, three times at most."""
    client = openai.OpenAI(base_url=URL, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What time is it in Oslo?"}]
    for _ in range(3):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[CLOCK], tool_choice="auto", max_tokens=48
        ).choices[0]
        messages.append(answer.message.to_dict())
        for call in answer.message.tool_calls or ():
            print("calls", call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "12:00"})
        if not answer.message.tool_calls:
            break
    print("answers", answer.finish_reason, answer.message.content)


if __name__ == "__main__":
    main()

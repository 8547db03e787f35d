"""The same question for a model and for each of its LoRA adapters.

    python examples/lora.py [BASE_URL]

It needs the package openai. `headrace up --model NAME --enable-lora --lora-modules poet=FOLDER` serves an adapter.
"""

import sys

import openai

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7056/v1"


def main() -> None:
    """Prints the answer of each. An adapter is called as a model."""
    client = openai.OpenAI(base_url=URL, api_key="none")
    for model in client.models.list().data:
        answer = client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": "Describe the sea."}],
            max_tokens=24,
        )
        parent = (model.model_extra or {}).get("parent")
        of_model = f" (adapter of {parent})" if parent else ""
        print(f"{model.id}{of_model}: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()

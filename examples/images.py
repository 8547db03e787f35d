"""A question about a picture, sent in the request.

    python examples/images.py [BASE_URL] [PICTURE.png]

It needs the package openai, and a model that takes images, such as Qwen2-VL: docs/models.md.
"""

import base64
import sys
from pathlib import Path

import openai

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:7056/v1"
PICTURE = Path(sys.argv[2]) if len(sys.argv) > 2 else None
# One red pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="


def main() -> None:
    """Prints the answer."""
    client = openai.OpenAI(base_url=URL, api_key="none")
    data = base64.b64encode(PICTURE.read_bytes()).decode() if PICTURE else PIXEL
    content = [
        {"type": "text", "text": "What is in the picture?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": content}],
        max_tokens=24,
    )
    print("answers", answer.choices[0].message.content)


if __name__ == "__main__":
    main()

"""Uses a Headrace router through LiteLLM: python litellm_completion.py http://HOST:PORT"""

import json
import sys
from typing import Any

import litellm

MESSAGES = [{"role": "user", "content": "Hello"}]
LONG = [{"role": "user", "content": "x" * 20_000}]
HERE: dict[str, Any] = {
    "model": "openai/sim",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "max_tokens": 8,
    "temperature": 0,
    "max_retries": 0,
    "timeout": 30,
}

litellm.suppress_debug_info = True
chat = litellm.completion(messages=MESSAGES, **HERE)
text = chat.choices[0].message.content
chunks = litellm.completion(messages=MESSAGES, stream=True, **HERE)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
try:
    litellm.completion(messages=LONG, **HERE)
    too_long = None
except litellm.BadRequestError as error:
    too_long = type(error).__name__
# LiteLLM itself answers for the model of the longer context.
router = litellm.Router(
    model_list=[
        {"model_name": "short", "litellm_params": HERE},
        {"model_name": "long", "litellm_params": {**HERE, "mock_response": "from long"}},
    ],
    context_window_fallbacks=[{"short": ["long"]}],
    num_retries=0,
)
fallen_back = router.completion(model="short", messages=LONG)
found = {
    "chat": bool(text) and chat.usage.completion_tokens == 8,
    "stream": streamed == text,
    "too long": too_long,
    "fallback": fallen_back.choices[0].message.content,
}
print(json.dumps(found))

"""Uses a Headrace router through LlamaIndex: python llama_index_chat.py http://HOST:PORT"""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    api_base=f"{sys.argv[1]}/v1",
    api_key="none",
    model="sim",
    is_chat_model=True,
    max_tokens=8,
    temperature=0,
    max_retries=0,
    timeout=30,
)
chat = model.chat([ChatMessage(role="user", content="Hello")])
text = chat.message.content
streamed = [chunk.delta or "" for chunk in model.stream_chat([ChatMessage(content="Hello")])]
found = {
    "chat": bool(text) and chat.raw.usage.completion_tokens == 8,
    "stream": "".join(streamed) == text,
}
print(json.dumps(found))

"""Chats with answers in blocks: /v1/messages of Anthropic and /v1/responses of OpenAI."""

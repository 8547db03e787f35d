"""The OpenAI HTTP API."""

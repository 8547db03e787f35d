"""The OpenAI HTTP API of the router."""

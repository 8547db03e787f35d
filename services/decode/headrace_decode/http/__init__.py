"""The OpenAI HTTP API of a decode worker, for gateways that choose the worker themselves."""

"""What every process that serves clients needs: from a client's request to tokens, and from tokens to its response.

- config: the settings that such processes share
- tenants: API keys
- answers: several answers to one prompt
- request: validation and tokenizing of requests, and the text of responses
- running: admission, trace and end of requests, which a dispatcher of the process runs
- openai: the OpenAI HTTP API
"""

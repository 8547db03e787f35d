"""Parsers of generated text: reasoning, tool calls and content. Pure."""

"""Main memory and disk below vLLM's KV memory."""

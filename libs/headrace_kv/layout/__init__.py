"""KV cache layouts as data."""

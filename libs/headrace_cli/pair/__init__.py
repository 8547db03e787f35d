"""The proxy that joins two stock vLLM servers."""

"""The prefill side of a transfer."""

"""The prefill side of transfers."""

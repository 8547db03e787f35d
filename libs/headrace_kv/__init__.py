"""The KV data plane: layouts, copy plans, transports, and both sides of a handoff."""

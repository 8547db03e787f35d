"""The KV data plane: layouts, plans, transports, and the accounting of what has arrived."""

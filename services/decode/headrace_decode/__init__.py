"""The decode service: receives KV caches and generates tokens."""

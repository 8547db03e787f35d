"""KV caches that are torch tensors on a device which no transport can read."""

"""KV caches in torch tensors, on devices that a transport may not read or write by itself."""

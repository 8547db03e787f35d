"""KV blocks in a store that all workers of a deployment share."""

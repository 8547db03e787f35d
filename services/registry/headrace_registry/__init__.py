"""The registry service: members by lease, their KV descriptors, and the run-time policy."""

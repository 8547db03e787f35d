"""The client of the registry: membership, view of members, KV descriptors."""

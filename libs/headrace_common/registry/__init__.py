"""The client of the registry: membership, view of members, KV descriptors.

Each part survives an outage of the registry, after which the registry may be empty (I7). Each takes
the registry's "host:port", or a channel that the caller opened and closes after stopping the part.
"""

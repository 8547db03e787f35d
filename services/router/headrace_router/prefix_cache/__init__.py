"""The index of cached prefixes of all workers."""

"""The tiers below KV memory: which blocks hold which cached prefixes, their copies, and a pool shared by workers."""

"""KV blocks in main memory and on disk, and the copies between these tiers and KV memory."""

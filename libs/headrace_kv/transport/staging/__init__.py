"""Staged writes: gather, scatter, and the cost model that chooses."""

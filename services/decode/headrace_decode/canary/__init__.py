"""Compares received KV with KV that this worker computes from the same tokens."""

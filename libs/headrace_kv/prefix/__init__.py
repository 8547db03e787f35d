"""Hashes of prompt prefixes and events of prefix caches."""

"""The trace store and its service."""

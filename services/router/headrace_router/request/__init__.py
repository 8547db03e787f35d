"""Validation of requests and the response stream."""

"""Validation of client requests, and the response stream."""

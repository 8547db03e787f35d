"""Attempts of a request, and retries."""

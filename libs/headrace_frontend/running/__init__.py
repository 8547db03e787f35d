"""Runs requests of clients, from their admission to the end of their response."""

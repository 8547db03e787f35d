"""Refuses a request on arrival if its first token is predicted to come too late."""

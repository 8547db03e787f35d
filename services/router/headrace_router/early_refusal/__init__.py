"""Refuses requests on arrival whose first token is predicted to come too late."""

"""Contexts: named remote deployments, and the choice of one for a command."""

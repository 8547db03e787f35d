"""Tickets: permissions that a router signs and a decode worker verifies."""

"""Replays a trace in a process of its own."""

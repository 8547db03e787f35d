"""Replays a trace in virtual time over the router's own placement, prefix index and queue, and the planner."""

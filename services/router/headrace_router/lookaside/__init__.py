"""Look-aside requests: tickets, and tracking of direct requests."""

"""Admission of requests to the engine: room, time to completion, and when to retry."""

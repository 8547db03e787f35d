"""The decisions of a router as events, so that they can be replayed."""

"""Links: one stream for all requests of one router."""

"""Links: one stream for all requests on one decode worker."""

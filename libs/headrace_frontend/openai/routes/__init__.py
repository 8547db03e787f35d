"""The routes of the HTTP API, in the order in which a request passes them."""

"""The HTTP server of every service, and its bounds."""

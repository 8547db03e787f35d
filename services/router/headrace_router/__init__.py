"""The router: validates requests, places them on workers and streams the responses."""

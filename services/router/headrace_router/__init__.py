"""The router: takes requests, places them and streams the answers."""

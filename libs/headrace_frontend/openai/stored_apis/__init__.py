"""The routes of responses and conversations, which are stored between requests."""

"""The decode workers, their availability and load."""

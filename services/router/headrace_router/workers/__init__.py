"""The view of workers, their availability and load."""

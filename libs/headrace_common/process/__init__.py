"""Start, run and end of a service process."""

"""A transport between two processes of one host."""

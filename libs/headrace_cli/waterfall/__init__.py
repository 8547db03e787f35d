"""A request in text: the sum of its time to first token, its steps, its links and their layers."""

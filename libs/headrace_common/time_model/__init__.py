"""How long a worker takes for a step and for a hand-over, learned from its own. Pure."""

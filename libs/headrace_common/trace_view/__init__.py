"""One request's trace as readers need it: the parts of its latency, its links and their layers."""

"""One request of the simulation engine, and its transfer."""

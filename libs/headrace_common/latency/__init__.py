"""Times of a request as parts that add up, and the clocks of other hosts. Pure."""

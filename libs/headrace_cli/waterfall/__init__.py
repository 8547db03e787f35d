"""A trace as a waterfall: rows, units and drawing."""

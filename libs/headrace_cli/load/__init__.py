"""The load generator behind `headrace bench`."""

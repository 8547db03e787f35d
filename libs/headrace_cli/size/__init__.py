"""`headrace size`."""

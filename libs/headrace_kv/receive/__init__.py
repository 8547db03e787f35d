"""The decode side of a transfer."""

"""Definitions that the sender and the receiver share."""

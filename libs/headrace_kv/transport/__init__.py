"""Transports: how KV bytes move from one rank's memory into another's."""

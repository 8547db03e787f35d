"""Transfers of the simulation engine."""

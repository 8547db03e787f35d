"""Scheduling and execution of one step of the simulation engine."""

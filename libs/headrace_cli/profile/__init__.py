"""Measures a worker for the planner and the simulator."""

"""Metrics of a process: instruments, their export to a collector, and their text for Prometheus."""

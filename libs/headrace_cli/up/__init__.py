"""Starts and supervises the services of a deployment."""

"""Publishes the prefix cache of an engine to routers."""

"""Pulls tasks from routers: streams, credits, and the shares of several routers."""

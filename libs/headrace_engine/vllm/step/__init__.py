"""The plan of one engine step, sent from the scheduler side to the worker side."""

"""Draws a trace as a waterfall."""

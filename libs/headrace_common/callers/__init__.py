"""Bounds on what one caller of a client listener may cost all others."""

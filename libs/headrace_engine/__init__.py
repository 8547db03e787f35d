"""Engines: the interface, a verifiable simulation and vLLM."""

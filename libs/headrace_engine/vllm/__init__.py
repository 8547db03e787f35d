"""Real models through vLLM. The only package that imports vLLM."""

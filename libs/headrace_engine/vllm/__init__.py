"""Real models through vLLM. The only package that knows vLLM."""

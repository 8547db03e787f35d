"""Both halves of a KV connector, for any engine: plans beside its scheduler, and their execution in its ranks."""

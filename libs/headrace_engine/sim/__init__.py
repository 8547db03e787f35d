"""A continuous-batching engine with real KV memory and a model whose output can be checked."""

"""A continuous-batching engine with real KV memory and a model with verifiable output."""

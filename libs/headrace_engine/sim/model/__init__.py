"""The model of the simulation engine: KV bytes and tokens have a closed form."""

"""KV memory and block pools of the simulation engine."""

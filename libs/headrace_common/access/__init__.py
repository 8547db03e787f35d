"""Which role may call which RPC, and how a caller proves its role."""

"""The registry: who is there, where their KV memory lies, and the policy they run under."""

"""Which prefill and decode workers hand KV over, by the places where they run."""

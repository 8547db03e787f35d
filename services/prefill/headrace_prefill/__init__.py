"""The prefill service: computes prompts and sends their KV cache."""

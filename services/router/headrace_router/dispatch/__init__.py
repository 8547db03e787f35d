"""Runs requests: attempts on decode and prefill workers, and retries."""

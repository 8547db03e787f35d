"""The queue of prefill tasks."""

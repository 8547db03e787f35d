"""The common part of prefill and decode worker processes."""

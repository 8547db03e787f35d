"""What our services do for the connector, done inside vLLM's own processes where there are no services."""

"""The vLLM engine as seen from the service process."""

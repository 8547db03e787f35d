"""The local link between the service process and the vLLM engine process."""

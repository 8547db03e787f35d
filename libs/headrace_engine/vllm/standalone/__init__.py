"""What Headrace's services do for the connector, inside the processes of a stock vLLM server."""

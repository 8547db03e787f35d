"""The scheduler side of the connector."""

"""The worker side of the connector, one per rank."""

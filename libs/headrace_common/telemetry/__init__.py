"""OpenTelemetry set-up, metrics, and the schema of every telemetry name."""

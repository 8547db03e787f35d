"""OpenTelemetry set-up, exporters, metrics, and the schema of all telemetry names."""

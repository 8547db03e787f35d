"""What every Headrace service shares: errors, configuration, gRPC bootstrap, telemetry, deadlines."""

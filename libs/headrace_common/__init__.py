"""Code that all services share: errors, settings, gRPC, the registry client, telemetry, deadlines, limits."""

"""gRPC servers, channels and the mapping between errors and statuses."""

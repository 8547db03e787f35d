"""The traces of the last requests, and the gRPC services that fill and show them."""

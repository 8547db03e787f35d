"""Carries targets out in Kubernetes, by the scale subresource of the workers' workloads."""

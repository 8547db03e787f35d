"""The worker of both roles: one engine that computes prompts for other workers, and generates."""

"""The planner: observes a model's deployment, decides how many workers it needs, and publishes or explains that."""

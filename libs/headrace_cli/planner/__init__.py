"""`headrace planner`: decisions about the numbers of workers."""

"""A deployment of processes on this machine: topology, supervisor, watchdog, state file."""

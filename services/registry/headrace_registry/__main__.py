"""`python -m headrace_registry`."""

from headrace_registry.main import main

main()

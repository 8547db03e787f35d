"""`python -m headrace_router`."""

from headrace_router.main import main

main()

"""Starts the prefill service."""

from headrace_prefill.main import main

if __name__ == "__main__":
    main()

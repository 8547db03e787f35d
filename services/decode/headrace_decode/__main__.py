"""Starts the decode service."""

from headrace_decode.main import main

if __name__ == "__main__":
    main()

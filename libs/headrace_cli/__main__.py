"""Starts the command line."""

from headrace_cli.main import main

if __name__ == "__main__":
    main()

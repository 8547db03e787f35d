"""Starts the command line."""

from headrace_common.process.start import start


def main() -> None:
    """Entry point of the console script."""
    start("headrace_cli.main", "headrace", ("cli",))


if __name__ == "__main__":
    main()

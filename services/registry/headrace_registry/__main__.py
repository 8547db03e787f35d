"""Starts the registry service."""

from headrace_common.process.start import start


def main() -> None:
    """Entry point of the console script."""
    start("headrace_registry.main", "headrace-registry", ("cli", "registry"))


if __name__ == "__main__":
    main()

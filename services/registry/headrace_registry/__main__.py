"""Starts the registry service."""

from headrace_common.process.start import start


def main() -> None:
    """Runs until SIGTERM."""
    start("headrace_registry.main")


if __name__ == "__main__":
    main()

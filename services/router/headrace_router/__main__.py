"""Starts the router service."""

from headrace_common.process.start import start


def main() -> None:
    """Runs until SIGTERM."""
    start("headrace_router.main", "headrace-router", ("cli", "router"))


if __name__ == "__main__":
    main()

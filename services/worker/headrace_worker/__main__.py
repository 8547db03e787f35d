"""Starts the worker of both roles."""

from headrace_common.process.start import start


def main() -> None:
    """Runs until SIGTERM."""
    start("headrace_worker.main", "headrace-worker", ("cli", "worker"))


if __name__ == "__main__":
    main()

"""Starts the prefill service."""

from headrace_common.process.start import start


def main() -> None:
    """Runs until SIGTERM."""
    start("headrace_prefill.main", "headrace-prefill", ("cli", "worker"))


if __name__ == "__main__":
    main()

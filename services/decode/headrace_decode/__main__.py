"""Starts the decode service."""

from headrace_common.process.start import start


def main() -> None:
    """Runs until SIGTERM."""
    start("headrace_decode.main", "headrace-decode", ("cli", "worker"))


if __name__ == "__main__":
    main()

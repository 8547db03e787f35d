"""Starts the planner service."""

from headrace_common.process.start import start


def main() -> None:
    """Entry point of the console script."""
    start("headrace_planner_service.main", "headrace-planner", ("cli", "planner"))


if __name__ == "__main__":
    main()

"""A decode worker that waits 0.3 s for the registry."""

from __future__ import annotations

from headrace_decode.main import main
from headrace_engine.worker import process

if __name__ == "__main__":
    vars(process)["REGISTRATION_TIMEOUT_S"] = 0.3
    main()

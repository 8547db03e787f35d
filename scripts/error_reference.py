"""Render the reference of all errors, over gRPC and over HTTP, as one Markdown page.

python scripts/error_reference.py OUTPUT.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from headrace_common.errors import HeadraceError
from headrace_frontend.openai.errors import error_object, status_of

HEAD = """# Errors

Every error of Headrace is one of these. Over gRPC it has a status, and `google.rpc.ErrorInfo` with the domain
`headrace` and the reason. Over HTTP it has a status and OpenAI's error object, where `headrace.reason` is the reason.
Messages has Anthropic's object.

| reason | gRPC | HTTP | `code` over HTTP | meaning |
|---|---|---|---|---|
"""


def rows() -> Iterator[str]:
    """A row for each class, in the order of the tree."""
    for kind in HeadraceError.__subclasses__():
        error = kind({"field": "remedy"}) if kind.__name__ == "InvalidRequest" else kind("detail")  # type: ignore[arg-type]
        meaning = " ".join((kind.__doc__ or "").split("\n\n", maxsplit=1)[0].split())
        code = error_object(error)["error"]["code"]
        yield f"| `{error.reason}` | {error.code.name} | {status_of(error)} | `{code}` | {meaning} |\n"


def main() -> int:
    """Entry point."""
    Path(sys.argv[1]).write_text(HEAD + "".join(rows()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

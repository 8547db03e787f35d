"""Downloads from a hub on loopback, in processes of their own: the client library reads its settings once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)

COMMIT = "5f0c" * 10
FILES = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickled",
    "README.md": b"text",
}
FETCH = """
import sys
from headrace_common.errors import ConfigError
from headrace_engine.vllm.model_folder import read_model_folder
from headrace_text.model_hub import TEXT_FILES, fetch_model, parse_hub_model
try:
    if sys.argv[2] == "text":
        print(fetch_model(parse_hub_model(sys.argv[1]), TEXT_FILES))
    else:
        folder = read_model_folder(sys.argv[1], 0)
        print(folder.path, folder.fingerprint)
except ConfigError as error:
    print(error.detail)
    sys.exit(3)
"""


class Hub(BaseHTTPRequestHandler):
    """Serves one repository, org/small, which has a branch named stable."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        base = "/api/models/org/small/revision/"
        if self.path.split("?")[0] in (base + "main", base + "stable"):
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(
                json.dumps({"id": "org/small", "sha": COMMIT, "siblings": siblings}).encode()
            )
        elif self.path.startswith(f"/api/models/org/small/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": len(body), "oid": sha256(body).hexdigest()}
                for name, body in FILES.items()
            ]
            self._answer(json.dumps(tree).encode())
        elif self.path.startswith(f"/org/small/resolve/{COMMIT}/"):
            self._answer(FILES[self.path.rpartition("/")[2]])
        else:
            self.send_error(404)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Silent."""


@contextmanager
def serving() -> Iterator[str]:
    """The hub's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def fetch(model: str, kind: str, home: Path, url: str) -> tuple[int, str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", FETCH, model, kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_routers_and_workers_fetch_what_they_need_and_use_it_without_the_hub(
    tmp_path: Path,
) -> None:
    with serving() as url:
        status, folder = fetch("hf:org/small", "text", tmp_path, url)
        assert status == 0, folder
        assert names(folder) == {"config.json", "tokenizer.json"}
        status, shown = fetch("hf:org/small@stable", "model", tmp_path, url)
        assert status == 0, shown
        folder, fingerprint = shown.split()
        # No pickled weights.
        assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
        assert fingerprint.startswith(f"small@{COMMIT}:")
        status, shown = fetch("hf:org/absent", "model", tmp_path, url)
        assert status == 3
        assert "hf:org/absent cannot be fetched" in shown
        assert "404" in shown
    assert fetch("hf:org/small", "model", tmp_path, url)[0] == 0
    status, shown = fetch("hf:org/small", "model", tmp_path / "other", url)
    assert status == 3
    assert "check the name, HF_TOKEN" in shown

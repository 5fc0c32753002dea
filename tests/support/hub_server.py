"""A small hub on this machine: repositories are made, files are committed to them, and what came is kept."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server that runs while the body does."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Hub:
    """What was sent to it."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Repository to its files."""
    is_private: dict[str, bool] = field(default_factory=dict)
    refuses_files: bool = False
    """Whether commits are answered with 403."""


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A hub that runs while the body does; name it by HF_ENDPOINT."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            return None

        def _answer(self, document: Any, code: int = 200) -> None:
            body = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer({"sha": "0" * 40, "siblings": []})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                hub.files.setdefault(name, {})
                hub.is_private.setdefault(name, asked.get("private") is True or asked.get("visibility") == "private")
                self._answer({"url": f"{hub.address}/{name}", "name": name})
                return
            if self.path == "/api/validate-yaml":
                self._answer({"errors": [], "warnings": []})
                return
            name = "/".join(self.path.removeprefix("/api/models/").split("/")[:2])
            if "/preupload/" in self.path:
                files = [{"path": item["path"], "uploadMode": "regular"} for item in json.loads(body)["files"]]
                self._answer({"files": [{**item, "shouldIgnore": False, "oid": None} for item in files]})
            elif hub.refuses_files:
                self._answer({"error": "no room"}, 403)
            else:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        hub.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                url = f"{hub.address}/{name}/commit/{'1' * 40}"
                self._answer({"commitUrl": url, "commitOid": "1" * 40, "success": True})

    with serving(Handler) as hub.address:
        yield hub

"""A host of clients' files over HTTP: some files, redirections, an endless file and one that never comes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def media_host(files: Mapping[str, bytes]) -> Iterator[str]:
    """Serve ``files`` by their names, ``to=URL`` as a redirection, ``endless`` and ``silent``. Yields ``HOST:PORT``."""
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            if name.startswith("to="):
                self.send_response(302)
                self.send_header("Location", name.removeprefix("to="))
                self.end_headers()
                return
            self.send_response(200 if name in {*files, "endless", "silent"} else 404)
            self.end_headers()
            with contextlib.suppress(OSError):
                while name == "endless":
                    self.wfile.write(bytes(1 << 20))
                if name == "silent":
                    is_over.wait(60)
                self.wfile.write(files.get(name, b""))

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()

"""A server on this machine that answers the hub's downloads, so that the hub's own library is tested, not replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving(repositories: Path) -> Iterator[str]:
    """Serve the folders ``owner/name`` below ``repositories`` as model repositories; yield the address."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, *, body: bool) -> None:
            # /owner/name/resolve/REVISION/FILE
            parts = self.path.partition("?")[0].strip("/").split("/")
            folder = repositories.joinpath(*parts[:2])
            file = folder / parts[-1]
            if len(parts) != 5 or not folder.is_dir():
                self.refuse("GatedRepo" if parts[0] == "gated" else "RepoNotFound")
            elif parts[3] not in ("main", COMMIT):
                self.refuse("RevisionNotFound")
            elif not file.is_file():
                self.refuse("EntryNotFound")
            else:
                self.send(file.read_bytes(), body=body)

        def send(self, content: bytes, *, body: bool) -> None:
            self.send_response(200)
            self.send_header("ETag", f'"{sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def refuse(self, code: str) -> None:
            self.send_response(403 if code == "GatedRepo" else 404)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(patch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """Let the hub's library download from ``address`` into the folder ``cache``."""
    from huggingface_hub import constants

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        patch.delenv(name, raising=False)
        patch.delenv(name.upper(), raising=False)
    patch.setattr(constants, "ENDPOINT", address)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)

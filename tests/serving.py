"""An HTTP server on this machine for downloads: with ranges or without, whole or cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Server:
    """Serves `files` by name. `ranges`: answers Range requests. `cut`: closes each connection after so many bytes of content.
    `length`: sends Content-Length. `shift`: a range begins so many bytes before what was asked for."""

    def __init__(self, files: dict[str, bytes], ranges: bool, cut: int | None, length: bool, shift: int) -> None:
        self.files, self.ranges, self.cut, self.length, self.shift = files, ranges, cut, length, shift
        self.asked: list[tuple[str, str | None]] = []
        self.url = ""


@contextmanager
def serving(
    files: dict[str, bytes], *, ranges: bool = True, cut: int | None = None, length: bool = True, shift: int = 0
) -> Iterator[Server]:
    """A server at `.url`; `.asked` collects the names and Range headers of requests."""
    state = Server(files, ranges, cut, length, shift)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, asked = self.path.rpartition("/")[2], self.headers.get("Range")
            state.asked.append((name, asked))
            if name not in state.files:
                self.send_error(404)
                return
            content = state.files[name]
            start = int(asked.removeprefix("bytes=").rstrip("-")) - state.shift if asked and state.ranges else 0
            if start >= len(content) > 0:
                self.send_error(416)
                return
            self.send_response(206 if asked and state.ranges else 200)
            if asked and state.ranges:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if state.length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : None if state.cut is None else start + state.cut])

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/some/where"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

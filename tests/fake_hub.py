"""A hub on loopback that shows the faults real ones do. It has shards of text and a repository of attention kernels.

An answer is a function of (handler, body) that sends a response; body is what a good hub would send.
"""

import base64
import gzip
import hashlib
import io
import json
import platform
import random
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import prepare

VAL = "shard_06542.parquet"


def parquet(columns):
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def shard_bytes(name):
    """A shard of its own for each name, some 100 kB that no compression makes small."""
    rng = random.Random(name)
    return parquet({"text": [f"{name} {rng.randbytes(500).hex()}" for _ in range(150)]})


BACKEND = f"cu{torch.version.cuda.replace('.', '')}" if torch.version.cuda else "cpu"
FITS = f"torch-stable-abi29-{BACKEND}-{platform.machine()}-linux"  # this machine and PyTorch
OTHERS = [f"torch-stable-abi99-{BACKEND}-{platform.machine()}-linux", f"torch-stable-abi29-{BACKEND}-s390x-linux",
          f"torch29-cxx11-cu10-{platform.machine()}-linux", f"torch-stable-abi29-{BACKEND}-{platform.machine()}-plan9"]
LIBRARY = b"\x7fELF" + struct.pack("<36xQ10xHH2x", 100_000, 64, 2) + bytes(100_064)  # whole: a table ends it


def kernel_files(init="# init", variant=FITS, archs=("9.0",), digest=True, **metadata):
    """One build as the repository holds it: path to bytes, none empty. `metadata` may use _ for the - in a key."""
    files = {"__init__.py": init.encode(), "_ops.abi3.so": LIBRARY, "layers/__init__.py": b"# layers"}
    metadata = {name.replace("_", "-"): value for name, value in metadata.items()}
    metadata = {"name": "flash-attn3", "id": f"_kernel_{hashlib.sha1(init.encode()).hexdigest()}", "version": 1,
                "license": "BSD-3-Clause", "python-depends": [], "backend": {"type": "cuda", "archs": archs}} | metadata
    if digest:
        sums = {name: base64.b64encode(hashlib.sha256(body).digest()).decode() for name, body in files.items()}
        metadata["digest"] = {"algorithm": "sha256", "files": sums}
    files["metadata.json"] = json.dumps(metadata).encode()
    return {f"build/{variant}/{name}": body for name, body in files.items()}


def write_kernel(folder, files):
    """Put files of the repository where prepare.py would."""
    for name, body in files.items():
        path = Path(folder, "flash-attn3", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


def send(handler, body, status=200, length=None, **headers):
    """A response with `body`, announced as `length` bytes: None is the truth, False is nothing."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    if length is not False:
        handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)
    handler.wfile.flush()


def status(code, **headers):
    return lambda handler, body: send(handler, b"no", status=code, **headers)


def instead(other):
    return lambda handler, body: send(handler, other)


def cut(handler, body):
    send(handler, body[:len(body) // 2], length=len(body))


def cut_without_length(handler, body):
    send(handler, body[:len(body) // 2], length=False)


def chunked(handler, body, end=True):
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    for piece in (body[:1000], body[1000:]):
        handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    if end:
        handler.wfile.write(b"0\r\n\r\n")


def cut_chunked(handler, body):
    chunked(handler, body[:len(body) // 2], end=False)


def reset(handler, body):
    cut(handler, body)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()  # at once and for good: the client sees a reset, not an end


def stall(handler, body):
    cut(handler, body)
    handler.server.hub.stalled.release()
    handler.server.hub.closing.wait(60)


def too_long(handler, body):
    send(handler, body + b"more", length=False)


def gzipped(handler, body):
    send(handler, gzip.compress(body), Content_Encoding="gzip")


def raw(content):
    """Something that need not be HTTP."""
    def answer(handler, body):
        handler.wfile.write(content)
    return answer


def redirect(location):
    return lambda handler, body: send(handler, b"", 302, Location=location)


def damaged_footer(handler, body):
    send(handler, body[:-300] + bytes(292) + body[-8:])


FAULTS = {
    "cut": cut, "cut, no length": cut_without_length, "cut in chunks": cut_chunked, "reset": reset, "stall": stall,
    "bytes after the end": too_long, "HTML": instead(b"<!doctype html><title>Sign in</title>"), "empty": instead(b""),
    "gzip": gzipped, "no column text": instead(parquet({"body": ["a"]})), "numbers": instead(parquet({"text": [1, 2]})),
    "bytes": instead(parquet({"text": [b"a"]})), "lists": instead(parquet({"text": [["a"]]})),
    "no rows": instead(parquet({"text": pa.array([], pa.string())})), "500": status(500), "503": status(503),
    "408": status(408), "425": status(425), "429": status(429), "501": status(501),
    "connection closed": raw(b""), "no HTTP": raw(b"220 mail\r\n"), "cut headers": raw(b"HTTP/1.1 200 OK\r\nConte"),
    "no size of a chunk": raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc"),
    "part": lambda handler, body: send(handler, body[:1000], 206), "204": lambda handler, body: send(handler, b"", 204),
    "length of another": lambda handler, body: send(handler, body, length=len(body) // 2),
    "zeros": lambda handler, body: send(handler, bytes(len(body))), "damaged footer": damaged_footer,
    "no type": instead(parquet({"text": pa.nulls(3)})),
    "redirect to a file": redirect("file:///dev/null"), "redirect to nowhere": redirect("http://127.0.0.1:99999/"),
    "redirect to nonsense": redirect("http://[::1/"),
}


class Handler(BaseHTTPRequestHandler):
    def good_body(self, path):
        """What a good hub has at `path`, in the kernel repository or a shard of that name; None for nothing."""
        hub, repo, branch = self.server.hub, *prepare.KERNEL
        if path.startswith(f"/kernels/{repo}/resolve/{branch}/"):
            return hub.kernel.get(path.removeprefix(f"/kernels/{repo}/resolve/{branch}/"))
        if path.startswith(f"/api/kernels/{repo}/tree/{branch}/"):
            folder = path.removeprefix(f"/api/kernels/{repo}/tree/{branch}/")
            return hub.list_kernel(folder, recursive="recursive=true" in self.path)
        name = path.rpartition("/")[2]
        return hub.bodies.get(name) or (shard_bytes(name) if name.endswith(".parquet") else None)

    def do_GET(self):
        path = unquote(self.path.partition("?")[0])
        hub, name, body = self.server.hub, path.rpartition("/")[2], self.good_body(path)
        with hub.lock:
            hub.requests.append((name, self.path, dict(self.headers), time.monotonic()))
            answers = hub.answers.get(name, [send if body is not None else status(404)])
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
        try:
            answer(self, body)
        except OSError:
            pass  # the client has gone
        self.close_connection = True

    def log_message(self, *_):
        pass


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass  # a connection that an answer has closed


class FakeHub:
    """`answers[name]` is what a file gets, request by request, the last one for ever; without it all goes well.

    The kernel repository holds `kernel`, path to bytes. The list of its builds has the name "build" here, and the list
    of a build's files that of the build.
    """

    def __init__(self):
        self.answers, self.bodies, self.requests, self.kernel = {}, {}, [], {}
        self.lock, self.closing, self.stalled = threading.Lock(), threading.Event(), threading.Semaphore(0)
        self.server = Hub(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def list_kernel(self, folder, recursive):
        """The hub's answer to a question for the content of a folder, None if there is no such folder."""
        below = [path for path in self.kernel if path.startswith(f"{folder}/")]
        folders = {path[:end] for path in below for end in range(len(folder) + 1, len(path)) if path[end] == "/"}
        listed = [{"type": "directory", "path": path, "oid": "0" * 40} for path in sorted(folders)]
        listed += [{"type": "file", "path": path, "size": len(self.kernel[path]), "oid": "0" * 40} for path in below]
        listed = [item for item in listed if recursive or item["path"].count("/") == folder.count("/") + 1]
        return json.dumps(listed).encode() if below else None

    def count(self, name):
        return sum(request[0] == name for request in self.requests)

    def gaps(self, name):
        times = [request[3] for request in self.requests if request[0] == name]
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    def close(self):
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()


def tiny_corpus():
    return {path.name: path.read_bytes() for path in (Path(__file__).parent / "corpus").glob("*.parquet")}


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited for 30 s in vain"
        time.sleep(0.02)


@pytest.fixture
def hub(monkeypatch):
    hub = FakeHub()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(prepare, "BASE_URL", f"{hub.url}/resolve/main")
    monkeypatch.setattr(prepare, "DOWNLOAD_WAITS", (0.01, 0.01, 0.01, 0.01))
    monkeypatch.setattr(prepare, "DOWNLOAD_TIMEOUTS", (5, 0.6))
    yield hub
    hub.close()

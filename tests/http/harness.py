# SPDX-License-Identifier: Apache-2.0
"""What the HTTP tests share: a server on a free port, a small client that sees raw bytes, and tensors without numpy.

A test file defines functions called test_*; run(globals()) runs them in order, those marked @aside beside the others, and exits 0 or 1.
Only the standard library is needed here.

Limits of time say what must not last for ever: they are generous, and more so under sanitizers (SLOW), since machines differ and are shared.
"""
import http.client
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURES = os.environ.get("EXPERTD_FIXTURES", os.path.join(HERE, "..", "fixtures"))
EXPERTD = os.environ.get("EXPERTD", os.path.join(HERE, "..", "..", "build", "server", "expertd"))
SLOW = float(os.environ.get("EXPERTD_TEST_SLOWNESS", "1"))  # more under sanitizers
SYNTHETIC = ["--synthetic", "E=8,K=2,H=64,I=64,L=1"]
# Rows of hidden 1024 that take a while, about as long under sanitizers, whose code computes a tenth to a fiftieth as fast.
LASTING = ["--synthetic", f"E=8,K=2,H=1024,I={2048 if SLOW == 1 else 128},L=1"]
SKIP = 77


def local_name():
    """A name of the loopback; the bare address where not even localhost is known (a chroot without /etc/hosts)."""
    try:
        socket.getaddrinfo("localhost", 0)
        return "localhost"
    except OSError:
        return "127.0.0.1"


def fixture(name):
    return os.path.join(FIXTURES, name)


class Server:
    """An expertd process; use as a context manager. `fixture` names a checkpoint, else a small synthetic model is served."""

    def __init__(self, *options, fixture_name=None, listen=("127.0.0.1:0",), ready=True, env=None, wrap=(), spool=None, program=None, **popen):
        self.log = []
        self.urls = []
        self.temporary = tempfile.mkdtemp(prefix="expertd-http-")
        self.spool = spool or self.temporary
        command = list(wrap) + [program or EXPERTD, "--threads", "1", "--spool-dir", self.spool, *options]
        if fixture_name:
            command += ["--model", fixture(fixture_name), "--adapter-root", fixture(fixture_name)]
        elif "--synthetic" not in options and "--model" not in options:
            command += SYNTHETIC
        for address in listen:
            command += ["--listen", address]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env={**os.environ, **(env or {})}, **popen)
        self.changed = threading.Condition()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        try:
            self._wait_listening(max(1, len(listen)))
            if ready:
                self.wait_ready()
        except Exception:
            self.stop()
            raise

    def _read(self):
        for line in self.process.stderr:
            text = line.decode("utf-8", "replace").rstrip("\n")
            with self.changed:
                self.log.append(text)
                if text.startswith("listening on "):
                    self.urls.append(text[len("listening on "):])
                self.changed.notify_all()
        with self.changed:
            self.log.append(None)
            self.changed.notify_all()

    def wait_log(self, pattern, timeout=20):
        """The first log line that matches."""
        end = time.monotonic() + timeout * SLOW
        seen = 0
        with self.changed:
            while True:
                for line in self.log[seen:]:
                    if line is not None and re.search(pattern, line):
                        return line
                if self.log and self.log[-1] is None or time.monotonic() > end:
                    raise AssertionError(f"no log line matches {pattern!r}; log: {self.log[-20:]}")
                seen = len(self.log)
                self.changed.wait(0.1)

    def _wait_listening(self, count):
        end = time.monotonic() + 20 * SLOW
        with self.changed:
            while len(self.urls) < count:
                if self.log and self.log[-1] is None or time.monotonic() > end:
                    raise AssertionError(f"the server does not listen; log: {self.log}")
                self.changed.wait(0.1)

    def wait_ready(self, timeout=30):
        end = time.monotonic() + timeout * SLOW
        while time.monotonic() < end:
            try:
                if self.call("GET", "/health/ready").status == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"the server does not get ready; log: {self.log[-20:]}")

    @property
    def port(self):
        return int(self.urls[0].rsplit(":", 1)[1])

    def connect(self, timeout=30):
        url = self.urls[0]
        if url.startswith("unix:"):
            s = socket.socket(socket.AF_UNIX)
            s.settimeout(timeout)
            s.connect(url[5:])
            return s
        host, port = url[len("http://"):].rsplit(":", 1)
        s = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout * SLOW)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return s

    def client(self):
        return Client(self)

    def call(self, method, path, body=None, headers=None):
        with self.client() as c:
            return c.call(method, path, body, headers)

    def raw(self, data, timeout=20, shut=False):
        """Sends bytes, returns everything until the server closes."""
        with self.connect() as s:
            s.sendall(data)
            if shut:
                s.shutdown(socket.SHUT_WR)
            return read_all(s, timeout)

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, timeout=30):
        status = self.process.wait(timeout * SLOW)
        self.reader.join(10)
        return status

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20 * SLOW)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.reader.join(10)
        self.process.stderr.close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if self.process.poll() is None and kind is None:
            self.signal()
            status = self.wait()
            self.stop()
            assert status == 0, f"exit status {status}; log: {self.log[-30:]}"
        else:
            if kind:
                print("  log:", *[line for line in self.log[-15:] if line], sep="\n    ")
            self.stop()


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def json(self):
        return json.loads(self.body)

    def __repr__(self):
        return f"{self.status} {self.headers} {self.body[:400]!r}"


class Client:
    """One connection, kept alive."""

    def __init__(self, server):
        self.server = server
        self.http = http.client.HTTPConnection("localhost")
        self.http.sock = server.connect()

    def call(self, method, path, body=None, headers=None):
        if self.http.sock is None:
            self.http.sock = self.server.connect()
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
        self.http.request(method, path, body, headers or {})
        r = self.http.getresponse()
        return Reply(r.status, {k.lower(): v for k, v in r.getheaders()}, r.read())

    @property
    def open(self):
        return self.http.sock is not None

    def close(self):
        self.http.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def read_all(s, timeout=20):
    """Bytes until end of file; a reset ends them, too. That there is an end is part of what is tested."""
    data, end = b"", time.monotonic() + timeout * SLOW
    while True:
        ready, _, _ = select.select([s], [], [], max(0, end - time.monotonic()))
        assert ready, f"the server does not close; it sent {data[:400]!r}"
        try:
            piece = s.recv(65536)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


def eventually(check, timeout=20):
    """Waits until check() is true; returns what it gave."""
    end = time.monotonic() + timeout * SLOW
    while True:
        got = check()
        if got:
            return got
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.02)


def gauge(server, name):
    """A number of /metrics without labels."""
    return float(re.search(rf"^{name} (\S+)$", server.call("GET", "/metrics").body.decode(), re.M).group(1))


def read_reply(s, timeout=20):
    """One reply with a Content-Length from a raw socket."""
    data, end = b"", time.monotonic() + timeout * SLOW
    s.settimeout(timeout * SLOW)
    while b"\r\n\r\n" not in data:
        piece = s.recv(65536)
        assert piece, f"closed after {data!r}"
        data += piece
    head, rest = data.split(b"\r\n\r\n", 1)
    status, headers = parse_head(head)
    length = int(headers.get("content-length", 0))
    while len(rest) < length and time.monotonic() < end:
        piece = s.recv(65536)
        assert piece, "closed in the body"
        rest += piece
    return Reply(status, headers, rest[:length]), rest[length:]


def parse_head(head):
    lines = head.decode("latin-1").split("\r\n")
    return int(lines[0].split()[1]), {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines[1:])}


def parse_replies(data):
    """All replies in a byte string."""
    replies = []
    while data:
        head, data = data.split(b"\r\n\r\n", 1)
        status, headers = parse_head(head)
        length = int(headers.get("content-length", 0)) if status >= 200 else 0
        replies.append(Reply(status, headers, data[:length]))
        data = data[length:]
    return replies


PACK = {"FP32": "f", "INT32": "i", "INT64": "q"}


def tensor(name, datatype, shape, data, binary=False):
    t = {"name": name, "datatype": datatype, "shape": list(shape)}
    if not binary:
        t["data"] = list(data)
        return t, b""
    if datatype == "BYTES":
        raw = b"".join(struct.pack("<I", len(x)) + x for x in (d.encode() for d in data))
    else:
        raw = struct.pack(f"<{len(data)}{PACK[datatype]}", *data)
    t["parameters"] = {"binary_data_size": len(raw)}
    return t, raw


def forward_body(tensors, binary=False, parameters=None, **top):
    """(body, headers) of an infer request from (name, datatype, shape, data) tuples."""
    made = [tensor(*t, binary=binary) for t in tensors]
    request = {"inputs": [t for t, _ in made], **top}
    if parameters:
        request["parameters"] = parameters
    head = json.dumps(request).encode()
    blob = b"".join(raw for _, raw in made)
    return head + blob, {"Inference-Header-Content-Length": str(len(head))} if binary else {}


def tokens(rows=2, hidden=64, k=2, experts=8, seed=1):
    """A small deterministic request: hidden, expert_ids, expert_weights."""
    value = lambda i: ((i * 7919 + seed * 104729) % 2001 - 1000) / 1000.0
    return [("hidden", "FP32", [rows, hidden], [value(i) for i in range(rows * hidden)]),
            ("expert_ids", "INT32", [rows, k], [(i * 3 + seed) % experts for i in range(rows * k)]),
            ("expert_weights", "FP32", [rows, k], [0.25 + (i % 3) / 4 for i in range(rows * k)])]


def heavy(rows, hidden, k, experts=8):
    """All bytes of a binary request of many equal rows, made quickly."""
    one = [tensor(*t, binary=True) for t in tokens(1, hidden, k, experts)]
    inputs = [{**t, "shape": [rows] + t["shape"][1:], "parameters": {"binary_data_size": rows * len(raw)}} for t, raw in one]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    blob = b"".join(raw * rows for _, raw in one)
    return (f"POST /moe/forward HTTP/1.1\r\nHost: a\r\nInference-Header-Content-Length: {len(head)}\r\n"
            f"Content-Length: {len(head) + len(blob)}\r\n\r\n").encode() + head + blob


def forward(server, tensors, binary=False, parameters=None, path="/moe/forward", headers=None, **top):
    body, more = forward_body(tensors, binary, parameters, **top)
    return server.call("POST", path, body, {**more, **(headers or {})})


def multipart(fields, boundary="b0undary"):
    """(body, headers) of a form from (name, bytes) pairs."""
    body = b"".join(b"--" + boundary.encode() + b"\r\nContent-Disposition: form-data; name=\"" + name.encode() +
                    b"\"; filename=\"f\"\r\nContent-Type: application/octet-stream\r\n\r\n" + data + b"\r\n" for name, data in fields)
    return body + b"--" + boundary.encode() + b"--\r\n", {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def adapter_files(fixture_name, adapter):
    folder = os.path.join(fixture(fixture_name), adapter)
    return [open(os.path.join(folder, n), "rb").read() for n in ("adapter_config.json", "adapter_model.safetensors")]


def check_error(reply, status, code, *words):
    """The reply is our error object, with all words in its sentence."""
    assert reply.status == status, f"wanted {status} {code}: {reply}"
    body = reply.json()
    assert body["code"] == code, f"wanted {code}: {reply}"
    assert body["request_id"] == reply.headers["x-request-id"], reply
    for word in words:
        assert word in body["error"], f"{word!r} is not in {body['error']!r}"


def aside(function):
    """Marks a test that mostly waits, with a server of its own: run() starts it first and goes on."""
    function.aside = True
    return function


def run(names):
    failed = []

    def run_one(name, function):
        start = time.monotonic()
        try:
            function()
            print(f"ok   {name} ({time.monotonic() - start:.2f} s)\n", end="", flush=True)
        except Exception:
            failed.append(name)
            print(f"FAIL {name}\n{traceback.format_exc()}", end="", flush=True)

    tests = [(name, function) for name, function in names.items()
             if name.startswith("test_") and callable(function) and (len(sys.argv) < 2 or name in sys.argv[1:])]
    beside = [threading.Thread(target=run_one, args=test) for test in tests if hasattr(test[1], "aside")]
    for thread in beside:
        thread.start()
    for test in tests:
        if not hasattr(test[1], "aside"):
            run_one(*test)
    for thread in beside:
        thread.join()
    sys.exit(1 if failed else 0)

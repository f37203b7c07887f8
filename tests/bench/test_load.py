#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""expert-bench load against servers made up here: failures are told apart, and a server that is gone is not hammered.

    test_load.py EXPERT_BENCH
"""
import csv
import http.server
import itertools
import json
import re
import subprocess
import sys
import threading
import time

MODEL = {"hidden_size": 4, "experts": 4, "top_k": 2, "layers": [0]}
GOOD = {"parameters": {"queue_us": 1, "compute_us": 2}, "outputs": [{"data": [1.0]}]}


class Server(http.server.ThreadingHTTPServer):
    """Answers forwards with statuses taken from `statuses`; None closes the connection, and the end of them the server."""
    daemon_threads = True

    def __init__(self, statuses):
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses = statuses
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def answer(self, status, tree):
        body = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, MODEL)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            status = next(self.server.statuses, "end")
        if status == "end":
            self.server.shutdown()
            self.server.server_close()
        if status in ("end", None):
            self.close_connection = True
        else:
            self.answer(status, GOOD if status == 200 else {"error": f"made up {status}"})

    def log_message(self, *_):
        pass


def load(statuses, *more):
    server = Server(iter(statuses))
    start = time.monotonic()
    r = subprocess.run([sys.argv[1], "load", "--url", server.url, "--rows", "1", "--warmup", "0", *more], capture_output=True, text=True, timeout=100)
    return r, time.monotonic() - start


def main():
    r, _ = load(itertools.repeat(200), "--duration", "0.3", "--clients", "2")
    assert r.returncode == 0 and not r.stderr and re.search(r"^0 failed, 0 refused", r.stdout, re.M), r
    assert re.search(r"^latency  p50 \d+ us", r.stdout, re.M), r

    # Without an answer there are no latencies; 429 is no error, and does not hide the first that is one.
    r, _ = load([429] * 3 + [503, 500, 503, None] + [429] * 100000, "--duration", "0.3")
    assert r.returncode == 1 and "latency  p50 - us  p90 -  p99 -  max -" in r.stdout, r
    assert re.search(r"^4 failed \(cut off: 1, 500: 1, 503: 2\), \d+ refused \(429\)", r.stdout, re.M), r
    assert 'load: first error: 503 {"error": "made up 503"}' in r.stderr and "stopped early" not in r.stderr, r
    r, _ = load(itertools.repeat(429), "--duration", "0.3")
    assert r.returncode == 1 and r.stdout.splitlines()[-1].startswith("0 failed, ") and not r.stderr, r

    # Requests that nobody will ever take are not repeated for a minute; one answer of another kind, and they may be worth it.
    r, seconds = load(itertools.repeat(404), "--duration", "60", "--clients", "2")
    assert r.returncode == 1 and "stopped early: these requests are refused" in r.stderr and seconds < 40, (r, seconds)
    assert re.search(r"^16 failed \(404: 16\)", r.stdout, re.M), r
    r, _ = load(itertools.chain([404] * 7, [503], itertools.repeat(404)), "--duration", "0.3")
    assert r.returncode == 1 and "stopped early" not in r.stderr, r

    # The server goes away. What it answers before the time is taken is not counted.
    r, seconds = load([200] * 2000, "--duration", "60", "--clients", "2", "--csv")
    assert r.returncode == 1 and "stopped early: no client has had any answer" in r.stderr and seconds < 40, (r, seconds)
    line, = csv.DictReader(r.stdout.splitlines())
    kinds = dict(kind.split(": ") for kind in line["failures"].split("; "))
    assert 0 < int(line["requests"]) <= 2000 and float(line["p50_us"]) > 0 and int(kinds["no connection"]) > 0, r
    assert int(line["failed"]) == sum(int(count) for count in kinds.values()), r
    assert "first error: no answer: " in r.stderr, r


main()

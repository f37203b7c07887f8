#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times what a server does besides answering: starting up, and swapping adapters under load.

    swap.py install --build build-bench --layers 4
    swap.py start --build build-bench --folder /dev/shm/checkpoint
    swap.py start --binary old/expertd --binary new/expertd --folder /dev/shm/checkpoint

install makes an adapter of rank --rank for all experts of a random model, serves that model, and in each of --rounds rounds loads it for
--seconds with nothing else going on and for as long while the adapter is replaced again and again. It prints the latency of the requests
of both, the time of each install as the client sees it, and the phases from the server's log. The files are in the page cache, since
they have just been written.

start runs the binaries in turns on a checkpoint (see made_files.py), from exec until ready, and prints the seconds and GB/s.
"""

import argparse
import http.client
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent


class Server:
    def __init__(self, binary, arguments, log):
        self.begun = time.monotonic()
        self.log = open(log, "w+")
        self.process = subprocess.Popen([str(binary), "--listen", "127.0.0.1:0", *arguments], stderr=self.log)
        self.port, self.host = None, "127.0.0.1"

    def call(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        connection.request(method, path, body=json.dumps(body) if body else None)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        return answer.status, data

    def await_ready(self, limit):
        """Seconds from exec."""
        while time.monotonic() - self.begun < limit:
            if self.process.poll() is not None:
                break
            if self.port is None:
                found = re.search(r"listening on http://127\.0\.0\.1:(\d+)", pathlib.Path(self.log.name).read_text())
                self.port = int(found.group(1)) if found else None
            elif self.call("GET", "/health/ready")[0] == 200:
                return time.monotonic() - self.begun
            time.sleep(0.01)
        sys.exit(f"the server did not get ready:\n{pathlib.Path(self.log.name).read_text()[-2000:]}")

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.close()


class Swapper(threading.Thread):
    """Replaces one adapter until told to stop."""

    def __init__(self, server, pause):
        super().__init__()
        self.server, self.pause, self.quit = server, pause, threading.Event()
        self.times, self.failures = [], []

    def run(self):
        while not self.quit.wait(self.pause):
            begin = time.monotonic()
            status, data = self.server.call("POST", "/adapters", {"name": "swapped", "path": "adapter", "replace": True})
            self.times.append(time.monotonic() - begin)
            if status not in (200, 201):
                self.failures.append(data)


def load(bench, server, a):
    out = subprocess.run([bench, "load", "--url", f"http://127.0.0.1:{server.port}", "--rows", str(a.rows), "--clients", str(a.clients),
                          "--duration", str(a.seconds), "--warmup", "0.5", "--csv", *(["--adapters", "used"] if a.adapted else [])],
                         stdout=subprocess.PIPE, check=True, text=True).stdout.split("\n")
    return {name: float(value) for name, value in zip(out[0].split(","), out[1].split(",")) if re.fullmatch(r"[\d.]+", value)}


def run_install(a):
    with tempfile.TemporaryDirectory(dir=a.work) as root:
        root = pathlib.Path(root)
        shape = ["--layers", str(a.layers), "--experts", str(a.experts), "--hidden", str(a.hidden), "--inter", str(a.inter)]
        subprocess.run([sys.executable, HERE / "made_files.py", "adapter", root / "adapter", "--rank", str(a.rank), "--dtype", a.dtype,
                        *shape], check=True)
        size = (root / "adapter" / "adapter_model.safetensors").stat().st_size
        model = f"E={a.experts},K={a.k},H={a.hidden},I={a.inter},L={a.layers}"
        server = Server(a.binary[0], ["--synthetic", model, "--adapter-root", str(root), "--log-level", "debug",
                                      "--max-adapter-bytes", str(1 << 40), *a.option], root / "log")
        try:
            server.await_ready(a.limit)
            begin = time.monotonic()
            status, data = server.call("POST", "/adapters", {"name": "used", "path": "adapter"})
            first = time.monotonic() - begin
            if status not in (200, 201):
                sys.exit(f"the first install failed: {status} {data!r}")
            print(f"{size / 1e9:.2f} GB in the file; first install {first * 1e3:.0f} ms", flush=True)
            times = []
            for n in range(a.rounds):
                quiet = load(a.bench, server, a)
                swapper = Swapper(server, a.pause)
                swapper.start()
                busy = load(a.bench, server, a)
                swapper.quit.set()
                swapper.join()
                if swapper.failures:
                    sys.exit(f"an install failed: {swapper.failures[0]!r}")
                times += swapper.times
                print(f"round {n}: alone p50 {quiet['p50_us']:.0f} us p99 {quiet['p99_us']:.0f}, {quiet['requests_s']:.0f} requests/s; "
                      f"with {len(swapper.times)} installs p50 {busy['p50_us']:.0f} p99 {busy['p99_us']:.0f} "
                      f"({(busy['p99_us'] / quiet['p99_us'] - 1) * 100:+.1f}%), {busy['requests_s']:.0f} requests/s; installs took "
                      + " ".join(f"{t * 1e3:.0f}" for t in swapper.times) + " ms", flush=True)
            if times:
                print(f"installs under load: median {statistics.median(times) * 1e3:.0f} ms, least {min(times) * 1e3:.0f}, "
                      f"most {max(times) * 1e3:.0f}, {size / statistics.median(times) / 1e9:.2f} GB/s")
            for line in pathlib.Path(server.log.name).read_text().split("\n"):
                if "values in" in line or "installed in" in line:
                    print(line)
        finally:
            server.stop()


def run_start(a):
    size = sum(f.stat().st_size for f in pathlib.Path(a.folder).glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as root:
        for n in range(a.rounds):
            for binary in a.binary:
                server = Server(binary, ["--model", str(a.folder), "--log-level", "debug", *a.option], pathlib.Path(root) / "log")
                try:
                    seconds = server.await_ready(a.limit)
                finally:
                    server.stop()
                print(f"round {n}: {binary}: {seconds:.2f} s from exec to ready, {size / seconds / 1e9:.2f} GB/s of {size / 1e9:.1f} GB",
                      flush=True)
                for line in pathlib.Path(server.log.name).read_text().split("\n"):
                    if n == 0 and re.search(r" (names|weights|loading weights|batches): | in .* s, ", line) and " request " not in line:
                        print(line, flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["install", "start"])
    p.add_argument("--build", type=pathlib.Path, help="build folder that has server/expertd and tests/bench/expert-bench")
    p.add_argument("--binary", action="append", default=[], help="an expertd in place of the build's")
    p.add_argument("--bench", help="an expert-bench in place of the build's")
    p.add_argument("--work", default="/dev/shm" if os.path.isdir("/dev/shm") else None, help="where adapters are made")
    p.add_argument("--folder", help="start: the checkpoint")
    p.add_argument("--layers", type=int, default=48)
    p.add_argument("--experts", type=int, default=128)
    p.add_argument("--k", type=int, default=8)
    p.add_argument("--hidden", type=int, default=2048)
    p.add_argument("--inter", type=int, default=768)
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--dtype", choices=["BF16", "F32"], default="BF16", help="of the adapter's file")
    p.add_argument("--rows", type=int, default=32)
    p.add_argument("--clients", type=int, default=4)
    p.add_argument("--adapted", action="store_true", help="requests use an adapter that stays")
    p.add_argument("--seconds", type=float, default=5)
    p.add_argument("--pause", type=float, default=0.5, help="seconds between installs")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--limit", type=float, default=600, help="seconds that a server may take to get ready")
    p.add_argument("--option", action="append", default=[], help="of the server, as --option=--threads=8")
    a = p.parse_args()
    if a.build:
        a.binary = a.binary or [a.build / "server" / "expertd"]
        a.bench = a.bench or a.build / "tests" / "bench" / "expert-bench"
    if not a.binary or (a.what == "install" and not a.bench) or (a.what == "start" and not a.folder):
        p.error("say which programs: --build, or --binary and --bench; and for start --folder")
    run_install(a) if a.what == "install" else run_start(a)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The GPU is lost (a preloaded library runs a kernel that traps) while requests run, and while nothing does."""
import http.client
import os
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "http"))
import harness  # noqa: E402
from harness import Server, check_error, forward, run, tokens  # noqa: E402

OPTIONS = ("--device", "cuda", "--synthetic", "E=16,K=4,H=1024,I=512,L=1")


def request(rows=32):
    return tokens(rows=rows, hidden=1024, k=4, experts=16)


def await_failure(server):
    """Ready turns 503 device_failed while the server still answers; then it leaves with a status that isn't 0."""
    until = time.monotonic() + 10
    while True:
        reply = server.call("GET", "/health/ready")
        if reply.status == 503 and reply.json().get("code") == "device_failed":
            break
        assert time.monotonic() < until, f"ready says {reply} long after the device was lost"
        time.sleep(0.02)
    check_error(forward(server, request(1), binary=True, parameters={"layer": 0}), 503, "device_failed")
    assert server.wait(30) not in (0, None)


def test_lost_under_load():
    seen, odd, lock = {}, [], threading.Lock()
    body, headers = harness.forward_body(request(), binary=True, parameters={"layer": 0})
    with Server(*OPTIONS, env={"LD_PRELOAD": os.environ["TRAP"]}) as server:
        def ask():
            client = server.client()
            while True:
                try:
                    reply = client.call("POST", "/moe/forward", body, headers)
                except (OSError, http.client.HTTPException):
                    return  # the process has gone
                what = (reply.status, reply.json().get("code") if reply.status != 200 else None)
                with lock:
                    seen[what] = seen.get(what, 0) + 1
                    if what not in ((200, None), (503, "device_failed")):
                        odd.append(repr(reply))
                        return
                if reply.status != 200:
                    return

        workers = [threading.Thread(target=ask) for _ in range(8)]
        for w in workers:
            w.start()
        time.sleep(1)
        server.signal(signal.SIGUSR1)
        await_failure(server)
        for w in workers:
            w.join(20)
            assert not w.is_alive()
    print("seen:", seen)
    assert not odd, odd[:3]
    assert seen.get((200, None), 0) > 0 and seen.get((503, "device_failed"), 0) > 0


def test_lost_while_idle():
    with Server(*OPTIONS, env={"LD_PRELOAD": os.environ["TRAP"]}) as server:
        assert forward(server, request(), binary=True, parameters={"layer": 0}).status == 200
        server.signal(signal.SIGUSR1)
        await_failure(server)


if __name__ == "__main__":
    probe = subprocess.Popen([harness.EXPERTD, "--device", "cuda", "--listen", "127.0.0.1:0", *harness.SYNTHETIC], stderr=subprocess.PIPE)
    first = b""
    for first in probe.stderr:
        if b"can't be used" in first or b" ready" in first:
            break
    probe.terminate()
    probe.wait(30)
    if b"can't be used" in first:
        print("SKIP:", first.decode().strip())
        sys.exit(harness.SKIP)
    run(globals())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The GPU is lost while requests run, and while nothing does: a preloaded library runs a kernel that traps, or one that does not end."""
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "http"))
import harness  # noqa: E402
from harness import Server, check_error, forward, run, tokens  # noqa: E402

SIZE = int(os.environ.get("EXPERTD_TEST_SIZE", "1024"))  # less on devices that compute slowly
OPTIONS = ("--device", "cuda", "--synthetic", f"E=16,K=4,H={SIZE},I={SIZE // 2},L=1")


def request(rows=32):
    return tokens(rows=rows, hidden=SIZE, k=4, experts=16)


def await_failure(server, within=10):
    """Ready turns 503 device_failed while the server still answers; then it leaves with a status that isn't 0."""
    until = time.monotonic() + within
    while True:
        reply = server.call("GET", "/health/ready")
        if reply.status == 503 and reply.json().get("code") == "device_failed":
            break
        assert time.monotonic() < until, f"ready says {reply} long after the device was lost"
        time.sleep(0.02)
    check_error(forward(server, request(1), binary=True, parameters={"layer": 0}), 503, "device_failed")
    assert server.wait(30) not in (0, None)


def lose_under_load(number, within):
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
        server.signal(number)
        await_failure(server, within)
        for w in workers:
            w.join(20)
            assert not w.is_alive()
        log = server.log
    print("seen:", seen)
    assert not odd, odd[:3]
    assert seen.get((200, None), 0) > 0 and seen.get((503, "device_failed"), 0) > 0
    return log


def lose_while_idle(number, within):
    with Server(*OPTIONS, env={"LD_PRELOAD": os.environ["TRAP"]}) as server:
        assert forward(server, request(), binary=True, parameters={"layer": 0}).status == 200
        server.signal(number)
        await_failure(server, within)
        return server.log


def test_lost_under_load():
    lose_under_load(signal.SIGUSR1, 10)


def test_lost_while_idle():
    lose_while_idle(signal.SIGUSR1, 10)


# The kernel that keeps the device would end after a minute; nobody waits for it, not even the process's own end.
def check_left_early(begin, log):
    assert time.monotonic() - begin < 45
    assert [line for line in log if line and re.search(r"error the device has failed: cuda:0: the device does not answer: .* has not ended", line)], log


def test_hung_under_load():
    begin = time.monotonic()
    log = lose_under_load(signal.SIGUSR2, 25)
    check_left_early(begin, log)
    assert [line for line in log if line and re.search(r"a batch of \d+ rows of layer index 0, begun 1\d\.\d s ago", line)], log


def test_hung_while_idle():
    begin = time.monotonic()
    check_left_early(begin, lose_while_idle(signal.SIGUSR2, 25))


def test_served_anew():
    """The device is there again for the next process."""
    with Server(*OPTIONS) as server:
        assert forward(server, request(), binary=True, parameters={"layer": 0}).status == 200


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

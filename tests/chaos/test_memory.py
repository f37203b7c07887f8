#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every allocation of every kind of call fails once, and the server goes on.

The server runs with fail_alloc.c preloaded ($FAIL_ALLOC). For each call the first allocation is made to fail, then the second, and so on until
a call gets through without meeting the failure. Each answer must be the right one, an error of ours, or a closed connection; and
afterwards nothing may be left behind: no adapter half installed, no staging memory taken, no request in flight.
"""
import mmap
import os
import re
import struct
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "http"))
from harness import SKIP, Server, adapter_files, forward_body, multipart, run, tokens  # noqa: E402

FAIL_ALLOC = os.environ.get("FAIL_ALLOC")
FIXTURE = "qwen3_moe"
LIMIT = 20000  # allocations of one call


def steps():
    """Each of the first hundred; from there on, where calls repeat themselves, ever fewer."""
    n = 1
    while n < LIMIT:
        yield n
        n += 1 + n // 100


class Control:
    """The two words that are shared with the preloaded library."""

    def __init__(self):
        self.file = tempfile.NamedTemporaryFile()
        self.file.write(bytes(16))
        self.file.flush()
        self.words = mmap.mmap(self.file.fileno(), 16)

    def arm(self, n):
        self.words[0:8] = struct.pack("<q", n)

    def failures(self):
        return struct.unpack("<q", self.words[8:16])[0]


def calls():
    """name -> (method, path, body, headers, statuses of success)."""
    rows = [("hidden", "FP32", [2, 128], [(i % 17 - 8) / 8 for i in range(256)]),
            ("expert_ids", "INT32", [2, 2], [0, 3, 5, 1]), ("expert_weights", "FP32", [2, 2], [0.5, 0.25, 0.75, 0.125])]
    named = rows + [("adapter", "BYTES", [2], ["kept", ""])]
    text, _ = forward_body(rows, parameters={"layer": 0})
    binary, binary_head = forward_body(named, binary=True, parameters={"layer": 0, "binary_data_output": True})
    config, model = adapter_files(FIXTURE, "adapter_2d_0")
    upload, upload_head = multipart([("adapter_config", config), ("adapter_model", model)])
    return {
        "forward as JSON": ("POST", "/moe/forward", text, {}, (200,)),
        "forward in binary with names": ("POST", "/moe/forward", binary, binary_head, (200,)),
        "malformed forward": ("POST", "/moe/forward", b'{"inputs":[{"name":"hidden"}]}', {}, (400,)),
        "install": ("POST", "/adapters", b'{"name":"passing","path":"adapter_peft3d_0","replace":true}', {}, (200, 201)),
        "upload": ("PUT", "/adapters/passing", upload, upload_head, (200, 201)),
        "list": ("GET", "/adapters", None, {}, (200,)),
        "remove": ("DELETE", "/adapters/passing", None, {}, (200, 404)),
        "vllm": ("POST", "/v1/load_lora_adapter", b'{"lora_name":"kept","lora_path":"adapter_2d_1"}', {}, (400,)),
        "models": ("GET", "/v1/models", None, {}, (200,)),
        "model": ("GET", "/moe/model", None, {}, (200,)),
        "config": ("GET", "/v2/models/" + FIXTURE + "/config", None, {}, (200,)),
        "statistics": ("GET", "/v2/models/stats", None, {}, (200,)),
        "metrics": ("GET", "/metrics", None, {}, (200,)),
        "openapi": ("GET", "/openapi.json", None, {}, (200,)),
        "nothing": ("GET", "/nothing", None, {}, (404,)),
    }


def outputs(body):
    """What has to be the same each time: all but the times."""
    return re.sub(rb'"(queue_us|compute_us)": ?\d+', b"", body)


def settled(server, wanted, what):
    """Waits until the server holds nothing for anybody."""
    end = time.monotonic() + 30
    while True:
        text = server.call("GET", "/metrics").body.decode()
        left = {k: float(v) for k, v in re.findall(r"^(expertd_staging_bytes|expertd_queue_rows|expertd_queue_requests) (\S+)$", text, re.M)}
        names = sorted(a["name"] for a in server.call("GET", "/adapters").json()["adapters"])
        flight = sum(a["in_flight"] for a in server.call("GET", "/adapters").json()["adapters"])
        if len(left) == 3 and not any(left.values()) and flight == 0 and (wanted is None or names == wanted):
            return
        assert time.monotonic() < end, f"{what}: left behind: {left}, adapters {names} with {flight} requests in flight"
        time.sleep(0.05)


def test_every_allocation_fails_once():
    control = Control()
    # Descriptors that leak would run out: the limit is low on purpose.
    with Server(fixture_name=FIXTURE, env={"LD_PRELOAD": FAIL_ALLOC, "FAIL_ALLOC_FILE": control.file.name}) as server:
        reply = server.call("POST", "/adapters", {"name": "kept", "path": "adapter_2d_1"})
        assert reply.status == 201, reply
        for name, (method, path, body, headers, good) in calls().items():
            exact = server.call(method, path, body, headers)
            assert exact.status in good, f"{name}: {exact}"
            met = closed = refused = 0
            for n in steps():
                before = control.failures()
                control.arm(n)
                try:
                    got = server.call(method, path, body, headers)
                except (OSError, Exception) as error:  # http.client's errors for a connection that was closed
                    got = None
                    assert type(error).__module__ in ("http.client", "builtins"), error
                control.arm(0)
                assert server.process.poll() is None, f"{name}: the server ended when allocation {n} failed; log: {server.log[-10:]}"
                if got is None:
                    closed += 1
                elif got.status in good:
                    if name.startswith("forward"):
                        assert outputs(got.body) == outputs(exact.body), f"{name}, allocation {n}: another answer: {got}"
                else:
                    refused += 1
                    assert got.status in (500, 503, 507), f"{name}, allocation {n}: {got}"
                    assert b'"error"' in got.body, f"{name}, allocation {n}: {got}"
                if control.failures() == before:
                    break
                met += 1
            else:
                raise AssertionError(f"{name}: still allocating after {LIMIT} allocations")
            print(f"  {name}: {met} allocations failed; {refused} answers were errors, {closed} connections closed", flush=True)
            assert met > 0, f"{name}: no allocation failed, the test tests nothing"
            settled(server, None, name)
        server.call("DELETE", "/adapters/passing?wait=5")
        settled(server, ["kept"], "the end")


if __name__ == "__main__":
    if not FAIL_ALLOC or not os.path.exists(FAIL_ALLOC):
        print("skipped: no preloadable library (sanitizers bring their own allocator)")
        sys.exit(SKIP)
    run(globals())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Load with adapters coming and going: memory must stay where it is, and every answer must stay right.

    soak.py --expertd build/server/expertd --bench build/tests/bench/expert-bench [--seconds 600] [--clients 4] [--rows 32] [--device cpu]
            [--fixture qwen3_moe] [--golden]

Serves a fixture with two adapters that the load uses (expert-bench checks each reply's bits against the first of its kind) while three more names
are installed, replaced, uploaded and removed all the time. Prints resident memory over time; exits 1 when it grew by more than
--growth MiB from the first third to the end, when it is past what weights and adapters explain by more than 256 MiB, or when anything failed.
With --golden, tools/golden_http.py (needs numpy) goes through the fixture meanwhile, and has to find every value where it belongs.
"""
import argparse
import os
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "http"))
import harness  # noqa: E402


def resident_mib(pid):
    with open(f"/proc/{pid}/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS:")) / 1024


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def churn(server, fixture, stop, counts, faults):
    """Installs, replaces, uploads and removes until told to stop."""
    sources = sorted(d for d in os.listdir(harness.fixture(fixture)) if d.startswith("adapter_"))
    files = harness.adapter_files(fixture, sources[0])
    body, headers = harness.multipart(list(zip(("adapter_config", "adapter_model"), files)))
    n = 0
    while not stop.is_set():
        n += 1
        name = f"churn-{n % 3}"
        with server.client() as c:
            if n % 5 == 0:
                got = c.call("PUT", f"/adapters/{name}", body, headers)
            else:
                got = c.call("POST", "/adapters", {"name": name, "path": sources[n % len(sources)], "replace": True})
            if got.status not in (200, 201):
                faults.append(repr(got))
            if n % 4 == 0:
                got = c.call("DELETE", f"/adapters/{name}?wait=5")
                if got.status != 200:
                    faults.append(repr(got))
        counts["changes"] = n
        if len(faults) > 10:
            return
        time.sleep(0.002)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--expertd", required=True)
    p.add_argument("--bench", required=True)
    p.add_argument("--fixture", default="qwen3_moe")
    p.add_argument("--seconds", type=float, default=600)
    p.add_argument("--clients", type=int, default=4)
    p.add_argument("--rows", type=int, default=32)
    p.add_argument("--device", default="cpu")
    p.add_argument("--golden", action="store_true")
    p.add_argument("--growth", type=float, default=8, help="MiB")
    a = p.parse_args()
    harness.EXPERTD = a.expertd
    samples, faults, counts = [], [], {"changes": 0}
    with harness.Server("--log-level", "warning", "--device", a.device, fixture_name=a.fixture) as server:
        sources = sorted(d for d in os.listdir(harness.fixture(a.fixture)) if d.startswith("adapter_"))
        for name, path in (("kept-0", sources[0]), ("kept-1", sources[-1])):
            reply = server.call("POST", "/adapters", {"name": name, "path": path})
            assert reply.status == 201, reply
        load = subprocess.Popen([a.bench, "load", "--url", server.urls[0], "--clients", str(a.clients), "--rows", str(a.rows), "--adapters",
                                 "kept-0,kept-1", "--base-percent", "30", "--duration", str(a.seconds), "--warmup", "1"])
        stop = threading.Event()
        thread = threading.Thread(target=churn, args=(server, a.fixture, stop, counts, faults))
        thread.start()
        start = time.monotonic()
        golden = None
        if a.golden:
            tool = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools", "golden_http.py")
            golden = subprocess.Popen([sys.executable, tool, "--url", server.urls[0], harness.fixture(a.fixture)])
        while load.poll() is None:
            time.sleep(max(0.5, a.seconds / 60))
            samples.append((time.monotonic() - start, resident_mib(server.process.pid), descriptors(server.process.pid)))
            if time.monotonic() - start > a.seconds + 60:
                load.kill()
        if golden and golden.wait(120) != 0:
            faults.append(f"golden_http.py ended with {golden.returncode}")
        stop.set()
        thread.join(30)
        model = server.call("GET", "/moe/model").json()
        explained = sum(v for k, v in model.items() if k in ("weight_bytes", "adapter_bytes", "bytes_resident", "adapters_bytes")) / 2**20
    for at, rss, fds in samples[:: max(1, len(samples) // 20)]:
        print(f"{at:7.1f} s  resident {rss:8.1f} MiB  descriptors {fds}")
    third = samples[len(samples) // 3 :]
    growth = max(s[1] for s in third[-max(1, len(third) // 4):]) - third[0][1]
    print(f"{counts['changes']} adapter changes; grew {growth:.1f} MiB after the first third; {samples[-1][1]:.0f} MiB resident, "
          f"weights and adapters {explained:.0f} MiB")
    for fault in faults:
        print("fault:", fault)
    # Another device's memory holds the weights, and its driver takes host memory of its own: there only growth tells.
    within = a.device != "cpu" or samples[-1][1] <= explained + 256
    good = load.returncode == 0 and not faults and growth <= a.growth and within and counts["changes"] > 10
    print("ok" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AssertionError as e:
        if "error --device: " not in str(e) or "be used: " not in str(e):
            raise
        print("SKIP:", e)
        sys.exit(harness.SKIP)

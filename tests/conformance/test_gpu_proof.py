#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_proof.sh with programs made up here: it counts what passed, failed and was skipped, and whoever ends it ends its checks."""
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpu_proof.sh")
PROGRAMS = ("expertd", "expert-bench", "test_kernels_cuda", "test_golden", "test_promises", "test_churn", "test_replay", "test_device_cuda",
            "libtrap_on_signal.so")


def programs(folder, **lines):
    """Each program runs its line of shell, or ends well."""
    for name in PROGRAMS:
        path = os.path.join(folder, name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\n{lines.get(name, 'exit 0')}\n")
        os.chmod(path, 0o755)


def command(folder, *more):
    return ["bash", SCRIPT, "--bin", folder, "--logs", os.path.join(folder, "logs"), *more]


def test_counts(folder):
    programs(folder, test_golden="exit 77", test_promises="echo because; exit 3")
    ran = subprocess.run(command(folder, "--group", "kernels,conformance"), capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.splitlines()[-1] == "13 passed, 3 failed, 3 skipped", ran.stdout
    assert ran.stdout.count("because") == 3 and ran.returncode == 1, ran.stdout
    programs(folder)
    ran = subprocess.run(command(folder, "--group", "kernels"), capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.splitlines()[-1] == "8 passed, 0 failed, 0 skipped" and ran.returncode == 0, ran.stdout


def alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


def test_its_end_ends_checks(folder, to_group):
    programs(folder, test_kernels_cuda='echo $$ >"$0.$1.${KERNEL_PART%/*}"; exec sleep 60')
    files = [os.path.join(folder, f"test_kernels_cuda.{code}.{part}") for code in ("sm90", "portable") for part in range(4)]
    script = subprocess.Popen(command(folder, "--group", "kernels", "--jobs", "8"), start_new_session=True, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 20
    while not all(os.path.exists(f) and os.path.getsize(f) for f in files):
        assert time.monotonic() < end and script.poll() is None, "the checks did not begin"
        time.sleep(0.05)
    pids = []
    for name in files:
        with open(name, encoding="utf-8") as file:
            pids.append(int(file.read()))
        os.unlink(name)
    (os.killpg if to_group else os.kill)(script.pid, signal.SIGTERM)
    assert script.wait(20) != 0
    end = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)
            raise AssertionError("checks outlived the script")
        time.sleep(0.05)


def main():
    with tempfile.TemporaryDirectory() as folder:
        test_counts(folder)
        for to_group in (False, True):
            test_its_end_ends_checks(folder, to_group)
    assert re.match(r"usage: gpu_proof\.sh ", subprocess.run(["bash", SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Each command that deploy/quickstart prints last is run as it stands, by a shell in another folder; the last one stops the server."""
import json
import os
import re
import subprocess
import tempfile
import time

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def main():
    with tempfile.TemporaryDirectory() as folder:
        printed = subprocess.run([os.path.join(TOP, "deploy", "quickstart"), "--port", "0"], stdout=subprocess.PIPE, text=True, check=True,
                                 cwd=folder).stdout
        pid = int(re.search(r"\(pid (\d+)\)", printed).group(1))
        stopped = False
        try:
            lines = printed[printed.index("Next:"):].replace("\\\n", " ").splitlines()[1:]
            commands = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
            assert len(commands) == 7 and commands[-1].split() == ["kill", str(pid)], commands
            for command in commands:
                r = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=folder, timeout=60)
                assert r.returncode == 0, (command, r)
                if r.stdout.startswith("{"):
                    assert "error" not in json.loads(r.stdout), (command, r.stdout)
            end = time.monotonic() + 30
            while os.path.exists(f"/proc/{pid}"):
                assert time.monotonic() < end, "the server is still there"
                time.sleep(0.05)
            stopped = True
        finally:
            if not stopped:
                os.kill(pid, 9)


main()

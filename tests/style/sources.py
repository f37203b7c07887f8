# SPDX-License-Identifier: Apache-2.0
"""Which files the style checks look at, and how they report."""
import os
import subprocess
import sys

TOP = os.path.abspath(os.path.join(os.path.dirname(__file__), "../.."))
SKIP = 77


def files():
    """Paths of the sources relative to the top: what git tracks or would, else everything outside build folders."""
    try:
        listed = subprocess.run(["git", "-C", TOP, "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                capture_output=True, check=True).stdout.decode().split("\0")
        found = [path for path in listed if path and os.path.isfile(os.path.join(TOP, path))]
    except (OSError, subprocess.CalledProcessError):
        found = []
    if not found:
        for folder, folders, names in os.walk(TOP):
            folders[:] = [name for name in folders if not name.startswith(("build", ".git", "__pycache__", ".dev"))]
            found += [os.path.relpath(os.path.join(folder, name), TOP) for name in names]
    return sorted(path for path in found if not path.startswith("shared/"))


def code(*endings):
    return [path for path in files() if path.endswith(endings) and not path.startswith("tests/fixtures/")]


def read(path):
    with open(os.path.join(TOP, path), encoding="utf-8") as file:
        return file.read()


def finish(faults):
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults")
    sys.exit(1 if faults else 0)

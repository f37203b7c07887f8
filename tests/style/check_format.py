#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""clang-format 14 (other versions format differently) leaves every C file as it is; skipped where there is none."""
import re
import shutil
import subprocess
import sys
import sources


def find_formatter():
    for name in ("clang-format-14", "clang-format"):
        path = shutil.which(name)
        if path and re.search(r"version 14\.", subprocess.run([path, "--version"], capture_output=True, text=True).stdout):
            return path
    return None


formatter = find_formatter()
if not formatter:
    print("no clang-format 14")
    sys.exit(sources.SKIP)
faults = []
for path in sources.code(".c", ".h"):
    result = subprocess.run([formatter, "--dry-run", "--Werror", path], cwd=sources.TOP, capture_output=True, text=True)
    if result.returncode:
        faults.append((result.stderr.splitlines() or [path])[0])
sources.finish(faults)

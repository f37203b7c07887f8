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
result = subprocess.run([formatter, "--dry-run", "--Werror", *sources.code(".c", ".cpp", ".h")], cwd=sources.TOP, capture_output=True, text=True)
faults = [line for line in result.stderr.splitlines() if ": error:" in line]
sources.finish(faults or ([result.stderr] if result.returncode else []))

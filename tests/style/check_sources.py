#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rules for sources that no compiler knows: licence lines, direction of includes, length, and words that do not belong."""
import re
import sources

# Folder -> what it may include of ours. A file named here stands for itself, else everything in the folder.
MAY_INCLUDE = {
    "kernels": ("kernels/",),
    "engine": ("engine/", "kernels/kernels.h", "kernels/dtype.h"),
    "proto-json": ("proto-json/", "kernels/dtype.h"),
    "server": ("server/", "proto-json/proto.h", "engine/engine.h", "kernels/dtype.h"),
}
OURS = tuple(folder + "/" for folder in MAY_INCLUDE)
SPDX = "SPDX-License-Identifier: Apache-2.0"
NO_LICENCE_LINE = (".json", ".safetensors", ".csv", ".txt", ".md", ".conf.in", ".gitignore", ".clang-format", "LICENSE", "/golden_http.py",
                   "/oracle.py", "/make_fixtures.py")
# Spelled in pieces, so that this file passes.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
LONGEST = 800


def check_licence(path, text):
    return [] if SPDX in "\n".join(text.splitlines()[:5]) else [f"{path}: no line {SPDX}"]


def check_includes(path, text):
    faults = []
    folder = path.split("/")[0]
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
        if not match:
            continue
        target = match.group(1)
        if target.endswith(".c"):
            faults.append(f"{path}:{number}: includes a source file, {target}")
        if folder in MAY_INCLUDE and target.startswith(OURS) and not target.startswith(MAY_INCLUDE[folder]):
            faults.append(f"{path}:{number}: {folder} must not include {target}")
    return faults


def check_code(path, text):
    faults = []
    lines = text.splitlines()
    if len(lines) > LONGEST:
        faults.append(f"{path}: {len(lines)} lines; past {LONGEST} a file is split")
    for number, line in enumerate(lines, 1):
        if UNFINISHED.search(line):
            faults.append(f"{path}:{number}: unfinished: {line.strip()[:80]}")
        if "\t" in line and not path.endswith((".md", "Makefile")):
            faults.append(f"{path}:{number}: tab")
        if line != line.rstrip():
            faults.append(f"{path}:{number}: blanks at the end")
        if re.search(r"\babort\s*\(", line) and path.startswith(OURS):
            faults.append(f"{path}:{number}: library code never aborts")
    return faults


found = []
for name in sources.files():
    if name.startswith("tests/fixtures/") or name.endswith((".safetensors", ".npz", ".bin")):
        continue
    content = sources.read(name)
    if not name.endswith(NO_LICENCE_LINE):
        found += check_licence(name, content)
    if name.endswith((".c", ".h", ".cu", ".cuh", ".in")):
        found += check_includes(name, content)
    if not name.endswith((".json", ".md", ".csv", "LICENSE")):
        found += check_code(name, content)
sources.finish(found)

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""embed.py IN.json OUT.h VERSION: checks that IN is JSON, sets info.version, and writes it, compacted, as a C array called openapi_json."""
import json
import sys

with open(sys.argv[1], encoding="utf-8") as f:
    api = json.load(f)
api["info"]["version"] = sys.argv[3]
text = json.dumps(api, separators=(",", ":")).encode()
with open(sys.argv[2], "w", encoding="ascii") as f:
    f.write("/* Generated from openapi.json. */\nstatic const unsigned char openapi_json[] = {\n")
    for i in range(0, len(text), 24):
        f.write("".join(f"{b}," for b in text[i:i + 24]) + "\n")
    f.write("0};\n")

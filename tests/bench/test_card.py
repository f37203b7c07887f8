#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""card.py and plot.py on figures made up here: verdicts, cut short programs and wrong results have to show.

    test_card.py MEASURE_C

MEASURE_C is measure.c, whose own line of column names is used, so that a change there is noticed.
"""
import os
import re
import subprocess
import sys
import tempfile
import xml.dom.minidom

HERE = os.path.dirname(os.path.abspath(__file__))
TARGETS = """
[limits]
limit value unit target
link_up 54 GB/s -
upload_whole - GB/s 80%link_up
[base]
shape rows floor vllm hf deepgemm target stretch
one 1 22 36.6 115 - 28 20
one 8 119 143 281 - 130 -
two 1 22 36.6 115 - 28 -
two 8 22 36.6 115 - 28 -
[lora]
shape adapters rank rows bytes vllm target
one 8 16 1 0.5 30 4
one 8 16 8 3.9 55 10
[http]
rows clients socket python_p50 python_rate wire target_p50 target_rate
"""
# As expert-bench would: a line a figure into the file behind --csv.
FAKE = """#!/usr/bin/env python3
import sys, time
out = open(sys.argv[sys.argv.index("--csv") + 1], "w")
if sys.argv[1] == "limits":
    out.write("limit,value,unit\\nlink_up,50.0,GB/s\\nupload_whole,45.0,GB/s\\n")
    sys.exit()
head = HEAD.split(",")
def line(shape, rows, us, adapters=0, error="1e-3", run="layer", ratio=""):
    known = dict(run=run, code="cuda", shape=shape, rows=rows, path="decode", adapters=adapters, rank=16 if adapters else 0, experts=0, skew=0,
                 floor_us=10, time_us=us, least_us=us, tflop_s=1, tb_s=1, touched=8, pairs=0, error=error, same_bits_as_eager=1, ratio=ratio)
    out.write(",".join(str(known[name]) for name in head) + "\\n")
out.write(HEAD + "\\n")
if "two" in sys.argv:
    line("two", 1, 20, error="1e-1")
    out.write("layer,cuda,two")  # cut short
    out.flush()
    time.sleep(60)
line("one", 1, 19.0)
line("one", 8, 143.0)
line("one", 1, 22.5, 8)
line("one", 8, 163.0, 8)
line("one", 1, 19.0, run="base-alone", ratio="1.0000")
line("one", 1, 20.0, run="base-installed", ratio="1.0500")
line("one", 1, 21.0, run="base-walked", ratio="1.1000")
"""


def card(folder, head):
    bench, targets, out = (os.path.join(folder, name) for name in ("bench", "targets.txt", "out"))
    with open(targets, "w", encoding="utf-8") as file:
        file.write(TARGETS)
    with open(bench, "w", encoding="utf-8") as file:
        file.write(FAKE.replace("HEAD", repr(head)))
    os.chmod(bench, 0o755)
    subprocess.run([sys.executable, os.path.join(HERE, "card.py"), "--bench", bench, "--out", out, "--targets", targets, "--only", "limits,base,lora",
                    "--budget", "base=6"], check=True, stdout=subprocess.DEVNULL, timeout=100)
    with open(os.path.join(out, "card.md"), encoding="utf-8") as file:
        return file.read()


def row(text, *cells):
    found = [line for line in text.splitlines() if line.startswith("| " + " | ".join(cells) + " |")]
    assert len(found) == 1, (cells, found, text)
    return found[0]


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        head = re.search(r'"(run,code,[^;]*)"', file.read(), re.S).group(1)
    head = re.sub(r'"\s*"', "", head).replace("\\n", "")
    with tempfile.TemporaryDirectory() as folder:
        text = card(folder, head)
        assert "1 of 3 targets met" in text and "1 of 2 targets met" in text, text
        assert "met, stretch too" in row(text, "one", "1", "10.0", "19.0")
        assert "missed by 10%" in row(text, "one", "8", "10.0", "143")
        assert "WRONG RESULT" in row(text, "two", "1", "10.0", "20.0")
        assert "not measured" in row(text, "two", "8", "", "")
        assert "base-two: cut short" in text
        assert "| 4 | met |" in row(text, "one", "8, r16", "1", "0.5")
        assert "| 20.0 | 55 | 10 | missed by 100% | met |" in row(text, "one", "8, r16", "8", "3.9")
        assert "| 1.0500 | missed |" in row(text, "one", "1", "decode", "19.0", "20.0")
        assert "90% of link_up, met" in row(text, "upload_whole")
        lines = [head]
        for rows in (1, 2, 8):
            for path in ("decode", "prefill"):
                known = dict(run="sweep-rows", shape="<one>", rows=rows, path=path, adapters=0, rank=0, floor_us=9 * rows, time_us=10 * rows)
                lines.append(",".join(str(known.get(name, 0)) for name in head.split(",")))
        sweep = os.path.join(folder, "sweep.csv")
        with open(sweep, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        subprocess.run([sys.executable, os.path.join(HERE, "plot.py"), "--out", folder, sweep], check=True, stdout=subprocess.DEVNULL, timeout=60)
        picture = xml.dom.minidom.parse(os.path.join(folder, "growth-<one>.svg"))
        curves = [len(line.getAttribute("points").split()) for line in picture.getElementsByTagName("polyline")]
        assert curves == [3, 3, 3], curves


main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every figure of targets.txt on this machine's GPU, in one run: ours beside floor, rivals and target.

    card.py --bench build/tests/bench/expert-bench --expertd build/server/expertd --out DIR [--only limits,base,lora,torch,http]
            [--budget base=150,http=60] [--cublas FILE] [--python PROGRAM]

Writes DIR/card.md, DIR/card.csv (one line a figure) and what each program printed (DIR/*.csv, DIR/*.log). Sections:

    limits     reading memory, a dense product by cuBLAS, the link, and the engine's uploads beside the link
    base       whole forwards without adapters, and base rows with and without adapters installed, in turns
    lora       what adapters add
    torch      transformers' grouped_mm on the same GPU (torch_experts.py; --python names one that has torch and transformers)
    http       a server of the qwen3-30b shape that this script starts and ends; expert-bench load is its client
    baseline   the two products by cuBLAS; not among those that run unless --only names it
    sweep      growth of cost, drawn by plot.py as DIR/growth-*.svg; likewise

A section that has used up its seconds is cut short, and what it has measured by then counts. Standard library only.
"""
import argparse
import csv
import glob
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
BUDGETS = {"limits": 20, "base": 170, "lora": 30, "torch": 80, "http": 80, "baseline": 60, "sweep": 90}
USUAL = ("limits", "base", "lora", "torch", "http")
SERVED = "E=128,K=8,H=2048,I=768,L=1"
SERVED_SHAPE = (128, 2048, 768)
SAME = 1.02  # base rows beside installed adapters may cost so much of what they cost without


def number(text):
    return None if text in ("-", "") else float(text)


def read_targets(path):
    tables, rows, head = {}, None, None
    with open(path, encoding="utf-8") as file:
        for line in file:
            words = line.split("#")[0].split()
            if not words:
                continue
            if words[0].startswith("["):
                rows, head = tables.setdefault(words[0].strip("[]"), []), None
            elif head is None:
                head = words
            else:
                rows.append(dict(zip(head, words)))
    return tables


class Run:
    """Programs under a section's budget, their logs, and the figures collected."""

    def __init__(self, options):
        self.options = options
        self.out = options.out
        self.figures = []  # (section, what, shape, rows, adapters, rank, value, unit, target, verdict)
        self.notes = []
        self.section, self.end = None, 0

    def begin(self, section):
        self.section = section
        self.end = time.monotonic() + self.options.budgets[section]
        print(f"{section}: at most {self.options.budgets[section]:.0f} s", flush=True)

    def left(self):
        return self.end - time.monotonic()

    def call(self, name, *command, **more):
        """True when the program ended by itself and well. Its output goes to DIR/<name>.log, to the screen when it failed."""
        log = os.path.join(self.out, f"{name}.log")
        seconds = self.left()
        if seconds < 2:
            self.note(f"{name}: no time left")
            return False
        start = time.monotonic()
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            try:
                status = subprocess.run(command, stdout=more.pop("stdout", file), stderr=file, timeout=seconds, **more).returncode
            except subprocess.TimeoutExpired:
                self.note(f"{name}: cut short after {seconds:.0f} s")
                return False
            except OSError as error:
                self.note(f"{name}: {error}")
                return False
        print(f"  {name}: {time.monotonic() - start:.1f} s", flush=True)
        if status:
            self.note(f"{name}: exit status {status}")
            with open(log, encoding="utf-8", errors="replace") as file:
                print("".join(file.readlines()[-5:]), flush=True)
        return status == 0

    def note(self, text):
        self.notes.append(text)
        print(f"  note: {text}", flush=True)

    def figure(self, what, value, unit, target=None, verdict="", shape="", rows="", adapters="", rank=""):
        self.figures.append((self.section, what, shape, rows, adapters, rank, value, unit, target, verdict))


def read_csv(path):
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
            return [row for row in rows if None not in row.values()]  # the last line may be cut
    except OSError:
        return []


def at_most(value, target):
    if value is None or target is None:
        return ""
    return "met" if value <= target else f"missed by {100 * (value / target - 1):.0f}%"


def at_least(value, target):
    if value is None or target is None:
        return ""
    return "met" if value >= target else f"missed by {100 * (1 - value / target):.0f}%"


def show(value, digits=None):
    if value is None:
        return ""
    if digits is None:
        digits = 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def find_cublas():
    """The file, where the loader would not find it by itself."""
    places = ["/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib", "/usr/lib/x86_64-linux-gnu"]
    places += [os.path.join(p, "nvidia", "*", "lib") for p in sys.path if p] + [os.path.join(p, "nvidia", "*", "*", "lib") for p in sys.path if p]
    places += ["/usr/lib/python3*/*-packages/nvidia/*/lib", "/usr/local/lib/python3*/*-packages/nvidia/*/lib", "/opt/*/lib/python3*/site-packages/nvidia/*/lib"]
    for place in places:
        found = sorted(glob.glob(os.path.join(place, "libcublas.so.1[0-9]")))
        if found:
            return found[-1]
    return None


# ---- sections ---------------------------------------------------------------------------------------------------------------


def run_limits(run):
    run.begin("limits")
    o, path = run.options, os.path.join(run.out, "limits.csv")
    run.call("limits", o.bench, "limits", "--csv", path, *(["--cublas", o.cublas] if o.cublas else []))
    return {row["limit"]: float(row["value"]) for row in read_csv(path)}


def report_limits(run, targets, limits):
    rows = []
    for t in targets["limits"]:
        value, goal, verdict = limits.get(t["limit"]), None, ""
        if value is None:
            continue
        if "%" in t["target"]:
            share, of = t["target"].split("%")
            if of in limits:
                goal = float(share) / 100 * limits[of]
                verdict = f"{100 * value / limits[of]:.0f}% of {of}, {at_least(value, goal)}"
        run.figure(t["limit"], value, t["unit"], goal, verdict)
        rows.append((t["limit"], show(value, 2), show(number(t["value"]), 2), t["unit"], verdict))
    return "## What the hardware reaches\n\n" + table(("limit", "now", "performance page", "unit", "verdict"), rows) if rows else ""


def kernel_calls(targets, only):
    """One program run a shape and set of adapters: its options, for the tables asked for."""
    base, lora = {}, {}
    for t in targets["base"]:
        base.setdefault(t["shape"], []).append(t["rows"])
    for t in targets["lora"]:
        lora.setdefault((t["shape"], t["adapters"], t["rank"]), []).append(t["rows"])
    calls = []
    if "base" in only:
        for shape, rows in base.items():
            # With adapters, for base rows beside them; those that the other table asks for first, so that a layer is loaded once.
            key = next((key for key in lora if key[0] == shape), (shape, "8", "16"))
            rows = sorted(set(rows + lora.pop(key, [])), key=int)
            calls.append(("base", f"base-{shape}", ["--shape", shape, "--rows", ",".join(rows), "--adapters", key[1], "--rank", key[2], "--installed"]))
    if "lora" in only:
        for (shape, adapters, rank), rows in lora.items():
            calls.append(("lora", f"lora-{shape}-{adapters}x{rank}",
                          ["--shape", shape, "--rows", ",".join(rows), "--adapters", adapters, "--rank", rank]))
    return calls


def run_kernels(run, targets):
    lines, section = [], None
    for name, label, options in kernel_calls(targets, run.options.only):
        if name != section:
            run.begin(name)
            section = name
        path = os.path.join(run.out, f"{label}.csv")
        run.call(label, run.options.bench, "kernel", *options, "--csv", path)
        lines += [dict(row, call=label) for row in read_csv(path)]
    return lines


def ours(lines, shape, rows, adapters=0, rank=0, run="layer", call=None):
    for line in lines:
        if (line["run"], line["shape"], line["rows"]) == (run, shape, str(rows)) and not line["code"].startswith("cublas"):
            if (line["adapters"], line["rank"]) == (str(adapters), str(rank)) and (call is None or line["call"] == call):
                return line
    return None


def report_base(run, targets, lines, torch, limits):
    rows, head = [], ("shape", "T", "floor", "ours", "of floor", "TFLOP/s", "HF now", "vLLM", "DeepGEMM", "target", "stretch", "verdict")
    met = total = 0
    run.section = "base"
    for t in targets["base"]:
        line = ours(lines, t["shape"], t["rows"])
        us, target, stretch = float(line["time_us"]) if line else None, number(t["target"]), number(t["stretch"])
        verdict = at_most(us, target) or "not measured"
        if us and stretch and us <= stretch:
            verdict += ", stretch too"
        wrong = line and line["error"] and (float(line["error"]) >= 4e-3 or line["same_bits_as_eager"] != "1")
        verdict = "WRONG RESULT" if wrong else verdict
        total += us is not None
        met += verdict.startswith("met")
        hf = torch.get((t["shape"], t["rows"]))
        floor = float(line["floor_us"]) if line else None
        rows.append((t["shape"], t["rows"], show(floor), show(us), f"{100 * floor / us:.0f}%" if line else "", line["tflop_s"] if line else "",
                     show(hf), t["vllm"], t["deepgemm"].replace("-", ""), t["target"], t["stretch"].replace("-", ""), verdict))
        if us:
            run.figure("forward", us, "us", target, verdict, t["shape"], t["rows"])
            run.figure("floor", floor, "us", None, "", t["shape"], t["rows"])
        if hf:
            run.figure("transformers grouped_mm", hf, "us", None, "", t["shape"], t["rows"])
    text = f"## Base forward, µs: {met} of {total} targets met\n\n" + table(head, rows)
    if limits.get("dense"):
        best = max((float(line["tflop_s"]) for line in lines if line["run"] == "layer" and line["adapters"] == "0"), default=0)
        text += f"\nThe best rate is {best:.0f} TFLOP/s, {100 * best / limits['dense']:.0f}% of the dense product's in this run.\n"
    return text + "\n" + report_installed(run, lines)


def report_installed(run, lines):
    rows = []
    for line in lines:
        if line["run"] != "base-installed":
            continue
        plain = [other for other in lines if other["call"] == line["call"] and other["run"] == "base-alone" and
                 (other["rows"], other["path"]) == (line["rows"], line["path"])]
        walked = [other for other in lines if other["call"] == line["call"] and other["run"] == "base-walked" and
                  (other["rows"], other["path"]) == (line["rows"], line["path"])]
        if not plain or not walked:
            continue
        alone, beside, idle = (float(x["time_us"]) for x in (plain[0], line, walked[0]))
        ratio = float(line["ratio"])
        verdict = "met" if ratio <= SAME else "missed"
        run.figure("base rows beside installed adapters", ratio, "ratio", SAME, verdict, line["shape"], line["rows"])
        rows.append((line["shape"], line["rows"], line["path"], show(alone), show(beside), f"{ratio:.4f}", verdict, show(idle), walked[0]["ratio"]))
    head = ("shape", "T", "path", "no adapters", "installed", "ratio", "within 2%", "adapters' steps run for nobody", "ratio")
    return "### Base rows beside installed adapters, µs, in turns\n\n" + table(head, rows) if rows else ""


def report_lora(run, targets, lines):
    rows, met, total = [], 0, 0
    run.section = "lora"
    for t in targets["lora"]:
        line = ours(lines, t["shape"], t["rows"], t["adapters"], t["rank"])
        base = ours(lines, t["shape"], t["rows"], call=line["call"]) if line else None
        adds = float(line["time_us"]) - float(base["time_us"]) if base else None
        verdict = at_most(adds, number(t["target"])) or "not measured"
        half = at_most(adds, number(t["vllm"]) / 2)
        total += adds is not None
        met += verdict == "met"
        rows.append((t["shape"], f"{t['adapters']}, r{t['rank']}", t["rows"], t["bytes"], show(float(base["time_us"])) if base else "",
                     show(adds), t["vllm"], t["target"], verdict, half))
        if adds is not None:
            run.figure("adapters add", adds, "us", number(t["target"]), verdict, t["shape"], t["rows"], t["adapters"], t["rank"])
    head = ("shape", "adapters", "T", "bytes", "base", "adds", "vLLM adds", "target", "verdict", "half of vLLM's")
    return f"## Adapters, µs added: {met} of {total} targets met\n\n" + table(head, rows)


def run_torch(run, targets):
    run.begin("torch")
    found = {}
    shapes = {}
    for t in targets["base"]:
        shapes.setdefault(t["shape"], []).append(t["rows"])
    every = sorted({r for rows in shapes.values() for r in rows}, key=int)
    path = os.path.join(run.out, "torch.csv")
    with open(path, "w", encoding="utf-8") as file:
        run.call("torch", run.options.python, os.path.join(HERE, "torch_experts.py"), "--device", "cuda", "--shape", ",".join(shapes), "--rows",
                 ",".join(every), "--budget", f"{run.left() - 12:.0f}", stdout=file)
    for row in read_csv(path):
        found[row["shape"], row["rows"]] = float(row["median_us"])
        if "launched" in row["kernels"]:
            run.note(f"torch, {row['shape']}, {row['rows']} rows: launched, not captured")
    return found


def run_baseline(run):
    run.begin("baseline")
    o, lines = run.options, []
    for shape, rows in (("olmoe64", "1,8,32,512,2048,8192"), ("qwen3-30b", "1,32,512,2048,8192"), ("mixtral", "1,8,512,2048")):
        path = os.path.join(run.out, f"baseline-{shape}.csv")
        run.call(f"baseline-{shape}", o.bench, "kernel", "--shape", shape, "--rows", rows, "--baseline", "all", "--time", "30", "--csv", path,
                 *(["--cublas", o.cublas] if o.cublas else []))
        lines += [dict(row, call=f"baseline-{shape}") for row in read_csv(path)]
    return lines


def report_baseline(run, lines):
    rows, run.section = [], "baseline"
    for line in lines:
        if line["run"] != "layer" or line["code"].startswith("cublas"):
            continue
        same = {x["code"]: x for x in lines if (x["shape"], x["rows"]) == (line["shape"], line["rows"]) and x["code"].startswith("cublas")}
        cells = []
        for code in ("cublas-plain", "cublas-grouped", "cublas-pointers"):
            x = same.get(code)
            cells.append(show(float(x["time_us"])) + ("" if x["path"] == "products" else " (launched)") if x else "does not apply")
            if x:
                run.figure(code, float(x["time_us"]), "us", None, "", line["shape"], line["rows"])
        rows.append((line["shape"], line["rows"], show(float(line["floor_us"])), show(float(line["time_us"])), *cells))
    head = ("shape", "T", "floor", "ours, whole forward", "cuBLAS, one call an expert", "grouped", "pointer arrays")
    return "## The two products by cuBLAS, µs\n\n" + table(head, rows) if rows else ""


def run_sweep(run):
    run.begin("sweep")
    for shape in ("olmoe64", "qwen3-30b"):
        run.call(f"sweep-{shape}", run.options.bench, "kernel", "--shape", shape, "--sweep", "all", "--rows", "1,8192", "--time", "15", "--csv",
                 os.path.join(run.out, f"sweep-{shape}.csv"))


def report_sweep(run):
    found = []
    for path in sorted(glob.glob(os.path.join(run.out, "sweep-*.log"))):
        with open(path, encoding="utf-8") as file:
            found += [line.rstrip() for line in file if re.match(r"CLIFF|PATH|\S+ +rows 1 to|\S+: \d+ cliffs", line)]
    return "## Growth\n\n" + "\n".join(f"    {line}" for line in found) + "\n" if found else ""


# ---- HTTP -------------------------------------------------------------------------------------------------------------------


class Server:
    """expertd with a made-up layer, on a free port and a Unix socket; ended at the end, it alone."""

    def __init__(self, run):
        self.run, self.process = run, None
        self.folder = tempfile.mkdtemp(prefix="card-")
        self.urls = []

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self):
        o = self.run.options
        unix = os.path.join(self.folder, "s")
        self.log = open(os.path.join(self.run.out, "server.log"), "w+", encoding="utf-8")
        self.process = subprocess.Popen([o.expertd, "--device", o.device, "--log-level", "warning", "--synthetic", SERVED, "--adapter-root", self.folder,
                                         "--batch-wait-us", o.batch_wait_us, "--listen", "127.0.0.1:0", "--listen", f"unix:{unix}"], stdout=self.log, stderr=subprocess.STDOUT)
        while self.run.left() > 0 and self.process.poll() is None:
            self.log.flush()
            with open(self.log.name, encoding="utf-8") as file:
                self.urls = re.findall(r"listening on (\S+)", file.read())
            if len(self.urls) == 2 and self.ready():
                return
            time.sleep(0.05)
        raise RuntimeError("the server did not become ready; see server.log")

    def ready(self):
        try:
            return self.call("GET", "/health/ready")[0] == 200
        except OSError:
            return False

    def call(self, method, path, body=None):
        host = next(url for url in self.urls if url.startswith("http"))[len("http://"):].rstrip("/")
        connection = http.client.HTTPConnection(host, timeout=30)
        try:
            connection.request(method, path, json.dumps(body) if body else None)
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def url(self, kind):
        return next(url for url in self.urls if url.startswith("unix") == (kind == "unix"))

    def __exit__(self, *_):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process:
            self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def write_adapter(folder, rank=16):
    """An adapter on every expert of the served layer, as PEFT writes it."""
    experts, hidden, inter = SERVED_SHAPE
    noise = random.Random(1)
    table_ = struct.pack("<32768H", *((noise.randrange(2) << 15) | 0x3c00 | noise.randrange(0x80) for _ in range(32768)))  # about ±0.01
    header, at, sizes = {}, 0, []
    for e in range(experts):
        for name, rows, columns in (("gate_proj", inter, hidden), ("up_proj", inter, hidden), ("down_proj", hidden, inter)):
            for matrix, shape in (("lora_A", [rank, columns]), ("lora_B", [rows, rank])):
                size = 2 * shape[0] * shape[1]
                header[f"base_model.model.model.layers.0.mlp.experts.{e}.{name}.{matrix}.weight"] = {
                    "dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
                sizes.append(size)
                at += size
    os.makedirs(folder)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "adapter_model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for size in sizes:
            file.write((table_ * (size // len(table_) + 1))[:size])
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["gate_proj", "up_proj", "down_proj"], "bias": "none"}, file)


def load(run, server, label, rows, clients, kind, *more, seconds=None):
    """One line of expert-bench load, or None."""
    path = os.path.join(run.out, f"{label}.csv")
    with open(path, "w", encoding="utf-8") as file:
        good = run.call(label, run.options.bench, "load", "--url", server.url(kind), "--rows", str(rows), "--clients", str(clients), "--duration",
                        str(seconds or run.options.seconds), "--warmup", "0.7", "--csv", *more, stdout=file)
    found = read_csv(path)
    return found[0] if good and found else None


def run_http(run, targets):
    run.begin("http")
    found, sides = {}, {"none": [], "installed": []}
    try:
        with Server(run) as server:
            for t in targets["http"]:
                label = f"http-{t['rows']}x{t['clients']}-{t['socket']}"
                found[t["rows"], t["clients"], t["socket"]] = load(run, server, label, t["rows"], t["clients"], t["socket"])
            if run.left() > 15:
                write_adapter(os.path.join(server.folder, "a"))
                for turn in range(3):  # with and without, in turns
                    for side in sides:
                        if side == "installed":
                            status, text = server.call("POST", "/adapters", {"name": "a", "path": "a"})
                        elif turn:
                            status, text = server.call("DELETE", "/adapters/a?wait=5")
                        else:
                            status, text = 200, b""
                        if status not in (200, 201):
                            raise RuntimeError(f"adapters: {status} {text[:200]}")
                        sides[side].append(load(run, server, f"http-{side}-{turn}", 32, 1, "tcp", seconds=1))
                found["adapted"] = load(run, server, "http-adapted", 32, 1, "tcp", "--adapters", "all", seconds=1)
    except (OSError, RuntimeError, StopIteration, socket.timeout) as error:
        run.note(f"http: {error}")
    return found, sides


def report_http(run, targets, found, sides):
    rows, run.section = [], "http"
    for t in targets["http"]:
        got = found.get((t["rows"], t["clients"], t["socket"]))
        p50, rate = (float(got["p50_us"]), float(got["rows_s"])) if got else (None, None)
        verdicts = [v for v in (at_most(p50, number(t["target_p50"])) and f"p50 {at_most(p50, number(t['target_p50']))}",
                                at_least(rate, number(t["target_rate"])) and f"rate {at_least(rate, number(t['target_rate']))}") if v]
        clean = got and (got["failed"], got["refused"], got["different"]) == ("0", "0", "0")
        verdict = "not measured" if not got else "; ".join(verdicts) if clean else "FAILED REPLIES"
        rows.append((t["rows"], t["clients"], t["socket"], show(p50, 0), t["target_p50"].replace("-", ""), show(rate, 0),
                     t["target_rate"].replace("-", ""), show(float(got["compute_p50_us"]), 0) if got else "",
                     show(float(got["overhead_p50_us"]), 0) if got else "", t["wire"].replace("-", ""), t["python_p50"].replace("-", ""),
                     t["python_rate"].replace("-", ""), verdict))
        if got:
            what = f"HTTP, {t['clients']} clients, {t['socket']}"
            run.figure(f"{what}, p50", p50, "us", number(t["target_p50"]), at_most(p50, number(t["target_p50"])), "qwen3-30b", t["rows"])
            run.figure(f"{what}, rows/s", rate, "rows/s", number(t["target_rate"]), at_least(rate, number(t["target_rate"])), "qwen3-30b", t["rows"])
    head = ("rows", "clients", "socket", "p50 µs", "target", "rows/s", "target", "compute p50", "overhead p50", "wire", "Python p50", "Python rows/s", "verdict")
    text = "## Over HTTP\n\n" + table(head, rows)
    middle = {side: sorted(float(x["compute_p50_us"]) for x in got if x) for side, got in sides.items()}
    if all(middle.values()):
        none, installed = (middle[side][len(middle[side]) // 2] for side in ("none", "installed"))
        text += (f"\n32 base rows, 1 client, TCP, compute p50: {none:.0f} µs without adapters, {installed:.0f} with one installed "
                 f"({installed / none:.3f}; medians of {len(middle['none'])} in turns)")
        adapted = found.get("adapted")
        text += f"; {float(adapted['compute_p50_us']):.0f} when every row uses it.\n" if adapted else ".\n"
        run.figure("HTTP, base rows beside an installed adapter, compute", installed / none, "ratio", SAME, "", "qwen3-30b", 32)
    return text


# ---- all of it --------------------------------------------------------------------------------------------------------------


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bench", required=True, help="expert-bench")
    p.add_argument("--expertd", help="the server; for http")
    p.add_argument("--device", default="cuda", help="of that server")
    p.add_argument("--batch-wait-us", default="0", help="of that server: microseconds or auto")
    p.add_argument("--out", required=True, help="folder, made when it is not there")
    p.add_argument("--only", default=",".join(USUAL))
    p.add_argument("--budget", default="", help="seconds of sections: base=150,http=60")
    p.add_argument("--cublas", help="libcublas.so; found by itself in the usual places")
    p.add_argument("--python", default=sys.executable, help="a Python with torch and transformers")
    p.add_argument("--seconds", type=float, default=1.5, help="of each load over HTTP")
    p.add_argument("--note", default="", help="stands below the plots: hardware, date")
    p.add_argument("--targets", default=os.path.join(HERE, "targets.txt"))
    o = p.parse_args()
    o.only = o.only.split(",")
    o.budgets = dict(BUDGETS)
    for item in filter(None, o.budget.split(",")):
        name, _, seconds = item.partition("=")
        if name not in BUDGETS:
            p.error(f"no section {name}")
        o.budgets[name] = float(seconds)
    unknown = [name for name in o.only if name not in BUDGETS]
    if unknown:
        p.error(f"no section {unknown[0]}")
    if "http" in o.only and not o.expertd:
        p.error("http needs --expertd")
    return o


def main():
    options = parse()
    os.makedirs(options.out, exist_ok=True)
    for path in glob.glob(os.path.join(options.out, "*.log")) + glob.glob(os.path.join(options.out, "*.csv")):
        os.unlink(path)  # of an earlier run
    options.cublas = options.cublas or find_cublas()
    targets, run, only = read_targets(options.targets), Run(options), options.only
    start, parts = time.monotonic(), []
    limits = run_limits(run) if "limits" in only else {}
    lines = run_kernels(run, targets) if {"base", "lora"} & set(only) else []
    torch = run_torch(run, targets) if "torch" in only else {}
    http_found, sides = run_http(run, targets) if "http" in only else ({}, {})
    baseline = run_baseline(run) if "baseline" in only else []
    if "sweep" in only:
        run_sweep(run)
    run.section = "limits"
    parts.append(report_limits(run, targets, limits))
    if "base" in only or torch:
        parts.append(report_base(run, targets, lines, torch, limits))
    if "lora" in only:
        parts.append(report_lora(run, targets, lines))
    if "http" in only:
        parts.append(report_http(run, targets, http_found, sides))
    parts.append(report_baseline(run, baseline))
    if "sweep" in only:
        parts.append(report_sweep(run))
    took = time.monotonic() - start
    head = f"# One run, one card\n\nMeasured {time.strftime('%d %b %Y %H:%M UTC', time.gmtime())} in {took:.0f} s by `card.py --only {','.join(only)}`.\n"
    notes = "## Notes\n\n" + "".join(f"- {note}\n" for note in run.notes) if run.notes else ""
    with open(os.path.join(options.out, "card.md"), "w", encoding="utf-8") as file:
        file.write("<!-- SPDX-License-Identifier: Apache-2.0 -->\n" + "\n".join(part for part in [head, *parts, notes] if part))
    with open(os.path.join(options.out, "card.csv"), "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("section", "what", "shape", "rows", "adapters", "rank", "value", "unit", "target", "verdict"))
        writer.writerows([f"{cell:.4g}" if isinstance(cell, float) and cell < 1000 else cell for cell in row] for row in run.figures)
    print(f"{took:.0f} s; {os.path.join(options.out, 'card.md')}")
    return 1 if any("exit status" in note for note in run.notes) else 0


if __name__ == "__main__":
    sys.exit(main())

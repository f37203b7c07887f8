#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the experts of transformers on PyTorch: the same shapes, rows and columns as bench_cpu prints.

    torch_experts.py [--threads N] [--shape olmoe64|qwen3-30b] [--rows T,T] [--seconds S] [--cpu-time] [--dtypes bf16,fp32]
                     [--impls eager,grouped_mm] [--matmul] > figures.csv
    torch_experts.py --device cuda [--shape olmoe64,qwen3-30b,mixtral,dsv3] [--rows T,T] [--seconds S] [--budget S] > figures.csv

On a GPU it is grouped_mm in bf16, a graph that goes round several batches as expert-bench kernel does it, timed by events; where
PyTorch can't capture a call it is launched, and "-launched" stands behind its name. --budget ends the program when so much time is
gone, between two measurements.

Needs torch and transformers. ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment keeps PyTorch from AMX. --matmul adds the rate of
plain matrix products of an expert's shape, which bounds what any loop over a library's products could reach. --cpu-time counts
processor time over threads, as bench_cpu does; set OMP_WAIT_POLICY=passive with it, so that waiting threads don't count.
"""
import argparse
import statistics
import sys
import time

START = time.perf_counter()

import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

SHAPES = {"olmoe64": (64, 8, 2048, 1024), "qwen3-30b": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14336), "dsv3": (256, 8, 7168, 2048)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def measure(options, fn):
    clock = time.process_time if options.cpu_time else time.perf_counter
    share = options.threads if options.cpu_time else 1
    fn()
    samples, end = [], time.perf_counter() + options.seconds
    while time.perf_counter() < end or len(samples) < 3:
        start = clock()
        fn()
        samples.append((clock() - start) / share * 1e6)
    return statistics.median(samples), min(samples), len(samples)


def make_experts(name, impl, dtype, device):
    experts, k, hidden, inter = SHAPES[name]
    config = Qwen3MoeConfig(num_experts=experts, num_experts_per_tok=k, hidden_size=hidden, moe_intermediate_size=inter)
    config._experts_implementation = impl
    with torch.device("meta"):
        layer = Qwen3MoeExperts(config)
    layer = layer.to(DTYPES[dtype]).to_empty(device=device)
    for p in layer.parameters():
        p.data.uniform_(-0.02, 0.02)
    return layer


def capture(step):
    """A graph of step, or None where PyTorch refuses."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        torch.cuda.synchronize()
        return graph
    except RuntimeError as error:
        print(f"not captured: {str(error).splitlines()[0]}", file=sys.stderr)
        torch.cuda.synchronize()
        return None


def bench_cuda(options, name, rows_list):
    experts, k, hidden, inter = SHAPES[name]
    layer = make_experts(name, "grouped_mm", "bf16", "cuda")
    for rows in rows_list:
        if time.perf_counter() > options.end:
            print(f"{name}: no time left from {rows} rows on", file=sys.stderr)
            break
        sets = [(torch.randn(rows, hidden, device="cuda").bfloat16(), torch.rand(rows, experts, device="cuda").topk(k, dim=1).indices,
                 torch.full((rows, k), 1.0 / k, device="cuda", dtype=torch.bfloat16)) for _ in range(4 if rows >= 2048 else 8)]

        def step():
            for one in sets:
                layer(*one)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()  # what is made once is made before
        torch.cuda.synchronize()
        graph = capture(step)
        run = graph.replay if graph else step
        samples, total = [], 0
        for i in range(-1, 64):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            if i >= 0:
                samples.append(begin.elapsed_time(end) * 1e3 / len(sets))
                total += begin.elapsed_time(end) * 1e-3
            if len(samples) >= 5 and total > options.seconds:
                break
        median = statistics.median(samples)
        flops = 6.0 * rows * k * hidden * inter
        print(f"{name},torch-grouped_mm-bf16{'' if graph else '-launched'},0,{rows},{median:.1f},{min(samples):.1f},"
              f"{flops / median * 1e-3:.1f},{len(samples)}", flush=True)
        del graph, run, sets
        torch.cuda.empty_cache()


def bench_experts(options, name, impl, dtype, rows_list):
    experts, k, hidden, inter = SHAPES[name]
    layer = make_experts(name, impl, dtype, "cpu")
    for rows in rows_list:
        x = torch.randn(rows, hidden).to(DTYPES[dtype])
        weights = torch.full((rows, k), 1.0 / k, dtype=DTYPES[dtype])

        def step():
            ids = torch.rand(rows, experts).topk(k, dim=1).indices
            layer(x, ids, weights)

        median, least, samples = measure(options, step)
        flops = 6.0 * rows * k * hidden * inter
        print(f"{name},torch-{impl}-{dtype},{options.threads},{rows},{median:.1f},{least:.1f},{flops / median * 1e-3:.1f},{samples}", flush=True)


def bench_matmul(options, name, dtype, rows_list):
    experts, k, hidden, inter = SHAPES[name]
    for rows in rows_list:
        per_expert = max(1, rows * k // experts)
        x = torch.randn(per_expert, hidden).to(DTYPES[dtype])
        w = [torch.randn(2 * inter, hidden).to(DTYPES[dtype]) for _ in range(32)]  # in turns, so that memory is read
        median, least, samples = measure(options, lambda: [torch.nn.functional.linear(x, v) for v in w])
        flops = 2.0 * per_expert * 2 * inter * hidden * len(w)
        print(f"{name},torch-matmul-{dtype},{options.threads},{per_expert},{median:.1f},{least:.1f},{flops / median * 1e-3:.1f},{samples}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", help="one or more, with commas; default: two on a CPU, all four on a GPU")
    parser.add_argument("--rows")
    parser.add_argument("--seconds", type=float, help="of a measurement; default 2 on a CPU, 0.06 on a GPU")
    parser.add_argument("--budget", type=float, default=1e9)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--impls", default="eager,grouped_mm")
    parser.add_argument("--matmul", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    gpu = options.device == "cuda"
    rows_list = [int(v) for v in (options.rows or ("1,8,32,128,512,2048,8192" if gpu else "1,8,64,512,2048")).split(",")]
    names = options.shape.split(",") if options.shape else list(SHAPES)[:4 if gpu else 2]
    options.seconds = options.seconds or (0.06 if gpu else 2)
    options.end = START + options.budget
    print("shape,kernels,threads,rows,median_us,min_us,gflops,samples")
    with torch.inference_mode():
        for name in names:
            if gpu:
                bench_cuda(options, name, rows_list)
                torch.cuda.empty_cache()
                continue
            for dtype in options.dtypes.split(","):
                for impl in filter(None, options.impls.split(",")):
                    bench_experts(options, name, impl, dtype, rows_list)
                if options.matmul:
                    bench_matmul(options, name, dtype, rows_list)


if __name__ == "__main__":
    main()

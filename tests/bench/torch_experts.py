#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the experts of transformers on PyTorch for CPU: the same shapes, rows and columns as bench_cpu prints.

    torch_experts.py [--threads N] [--shape olmoe64|qwen3-30b] [--rows T,T] [--seconds S] [--cpu-time] [--dtypes bf16,fp32]
                     [--impls eager,grouped_mm] [--matmul] > figures.csv

Needs torch and transformers. ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment keeps PyTorch from AMX. --matmul adds the rate of
plain matrix products of an expert's shape, which bounds what any loop over a library's products could reach. --cpu-time counts
processor time over threads, as bench_cpu does; set OMP_WAIT_POLICY=passive with it, so that waiting threads don't count.
"""
import argparse
import statistics
import time

import torch
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

SHAPES = {"olmoe64": (64, 8, 2048, 1024), "qwen3-30b": (128, 8, 2048, 768)}
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


def bench_experts(options, name, impl, dtype, rows_list):
    experts, k, hidden, inter = SHAPES[name]
    config = Qwen3MoeConfig(num_experts=experts, num_experts_per_tok=k, hidden_size=hidden, moe_intermediate_size=inter)
    config._experts_implementation = impl
    with torch.device("meta"):
        layer = Qwen3MoeExperts(config)
    layer = layer.to(DTYPES[dtype]).to_empty(device="cpu")
    for p in layer.parameters():
        p.data.uniform_(-0.02, 0.02)
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
    parser.add_argument("--shape")
    parser.add_argument("--rows", default="1,8,64,512,2048")
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--impls", default="eager,grouped_mm")
    parser.add_argument("--matmul", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows_list = [int(v) for v in options.rows.split(",")]
    print("shape,kernels,threads,rows,median_us,min_us,gflops,samples")
    with torch.inference_mode():
        for name in [options.shape] if options.shape else SHAPES:
            for dtype in options.dtypes.split(","):
                for impl in filter(None, options.impls.split(",")):
                    bench_experts(options, name, impl, dtype, rows_list)
                if options.matmul:
                    bench_matmul(options, name, dtype, rows_list)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes large random files to measure loading with: a qwen3_moe checkpoint, or a PEFT adapter of all its experts.

    made_files.py checkpoint DIR --layers 16 --experts 128 --hidden 2048 --inter 768 --shards 8
    made_files.py adapter DIR --layers 48 --experts 128 --hidden 2048 --inter 768 --rank 16

Names, dtypes, shapes and order are those that transformers and peft write. Values are random, small and finite; all tensors are
cut from one random block, so that making a file takes no longer than writing it.
"""

import argparse
import json
import math
import multiprocessing
import os
import pathlib
import random
import sys

BLOCK = 64 << 20  # bytes of random values that files are cut from
WIDTH = {"BF16": 2, "F32": 4}


def random_block(dtype, seed):
    """Little-endian floats between 2^-9 and 2^-5: the last byte of each keeps its sign alone."""
    block = bytearray(random.Random(seed).randbytes(BLOCK))
    last = slice(WIDTH[dtype] - 1, None, WIDTH[dtype])
    block[last] = block[last].translate(bytes((b & 0x80) | (0x3B + (b & 1)) for b in range(256)))
    return block


def write_file(path, tensors, dtype, seed):
    """tensors: (name, shape) in any order; a file has them by name."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in sorted(tensors):
        size = math.prod(shape) * WIDTH[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    block = random_block(dtype, seed)
    with open(path, "wb", buffering=0) as f:
        f.write(len(text).to_bytes(8, "little"))
        f.write(text)
        while at > 0:
            at -= f.write(memoryview(block)[: min(at, BLOCK)])


def linears(a, experts):
    for e in experts:
        yield e, "gate_proj", a.inter, a.hidden
        yield e, "up_proj", a.inter, a.hidden
        yield e, "down_proj", a.hidden, a.inter


def make_checkpoint(a):
    config = {"model_type": "qwen3_moe", "hidden_size": a.hidden, "moe_intermediate_size": a.inter, "num_experts": a.experts,
              "num_experts_per_tok": 8, "num_hidden_layers": a.layers, "hidden_act": "silu"}
    (a.folder / "config.json").write_text(json.dumps(config))
    shards, index = [[] for _ in range(a.shards)], {}
    names = [(f"model.layers.{l}.mlp.experts.{e}.{p}.weight", (out, inn))
             for l in range(a.layers) for e, p, out, inn in linears(a, range(a.experts))]
    for i, tensor in enumerate(names):
        shard = i * a.shards // len(names)
        shards[shard].append(tensor)
        index[tensor[0]] = f"model-{shard + 1:05}-of-{a.shards:05}.safetensors"
    total = sum(math.prod(shape) for _, shape in names) * WIDTH[a.dtype]
    (a.folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    with multiprocessing.Pool(min(a.shards, os.cpu_count())) as pool:
        pool.starmap(write_file, [(a.folder / f"model-{i + 1:05}-of-{a.shards:05}.safetensors", s, a.dtype, i)
                                  for i, s in enumerate(shards)])


def make_adapter(a):
    config = {"peft_type": "LORA", "r": a.rank, "lora_alpha": 2 * a.rank, "bias": "none", "peft_version": "0.21.0",
              "target_modules": ["gate_proj", "up_proj", "down_proj"]}
    (a.folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = []
    for l in range(a.layers):
        for e, p, out, inn in linears(a, range(a.experts)):
            module = f"base_model.model.model.layers.{l}.mlp.experts.{e}.{p}"
            tensors += [(module + ".lora_A.weight", (a.rank, inn)), (module + ".lora_B.weight", (out, a.rank))]
    write_file(a.folder / "adapter_model.safetensors", tensors, a.dtype, 1)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["checkpoint", "adapter"])
    p.add_argument("folder", type=pathlib.Path)
    p.add_argument("--layers", type=int, default=48)
    p.add_argument("--experts", type=int, default=128)
    p.add_argument("--hidden", type=int, default=2048)
    p.add_argument("--inter", type=int, default=768)
    p.add_argument("--rank", type=int, default=16, help="of an adapter")
    p.add_argument("--shards", type=int, default=8, help="files of a checkpoint, written in parallel")
    p.add_argument("--dtype", choices=sorted(WIDTH), default="BF16")
    a = p.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    make_checkpoint(a) if a.what == "checkpoint" else make_adapter(a)
    total = sum(f.stat().st_size for f in a.folder.iterdir())
    print(f"{a.folder}: {total} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()

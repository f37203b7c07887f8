#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How to call expertd from Python: binary tensors over one kept-alive connection, with the standard library and numpy.

    client = Client("http://127.0.0.1:8080")
    out, info = client.forward(hidden, expert_ids, expert_weights, layer=0, adapters=["legal", "", "medical"])

hidden is [T, H] of floats. They are sent as `datatype`, "BF16", "FP16" or "FP32", which unless given is FP16 for float16 and else FP32;
bfloat16 bits, which numpy has as uint16, are sent as they are, and only with datatype="BF16". expert_ids and expert_weights are
[T, K], from your router. adapters names one adapter for each row, "" for none. `out` is [T, H] of that datatype; from_bf16 widens BF16's
bits. Arguments that make no sense are a ValueError before anything is sent; what the server refuses is a Failure; a connection that fails is
an OSError or an http.client.HTTPException, and the next call opens a new one. A Client is for one thread at a time: take one for each.

Run as a program it posts a batch to a running server and says what came back:

    example_client.py [--url URL] [--fixture DIR] [--key-file FILE]

With --fixture, a folder of tests/fixtures that the server serves, rows use the installed adapters of that fixture in turn, and the
answer is compared with values computed in float64; otherwise the rows are random.
"""
import argparse
import http.client
import json
import os
import select
import socket
import struct
import sys
import time
import urllib.parse

import numpy as np

NUMPY_OF = {"BF16": np.uint16, "FP16": np.float16, "FP32": np.float32}


class Failure(Exception):
    """An error answer: status, and the server's code and sentence."""

    def __init__(self, status, body):
        try:
            error = json.loads(body)
            text = f"{status} {error.get('code')}: {error.get('error')}"
        except ValueError:
            text = f"{status}: {body[:200]!r}"
        super().__init__(text)
        self.status = status


def to_bf16(a):
    """Floats to bfloat16 bits, to nearest even."""
    a = np.array(a, np.float32, order="C", copy=True)
    bits = a.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(a), np.uint16(0x7FC0), rounded)


def from_bf16(bits):
    """bfloat16 bits to float32, exactly."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def require(condition, sentence):
    if not condition:
        raise ValueError(sentence)


def encode_hidden(hidden, datatype):
    """The datatype to send, and the array in it."""
    hidden = np.asarray(hidden)
    require(hidden.ndim == 2, f"hidden has shape {hidden.shape}; it takes [T, H]")
    is_float = hidden.dtype in (np.float16, np.float32, np.float64)
    require(is_float or hidden.dtype == np.uint16, f"hidden is of {hidden.dtype}; it takes floats, or bfloat16 bits as uint16")
    datatype = datatype or {np.dtype(np.float16): "FP16", np.dtype(np.uint16): None}.get(hidden.dtype, "FP32")
    require(datatype, 'hidden is of uint16; if these are bfloat16 bits, say datatype="BF16"')
    require(datatype in NUMPY_OF, f'datatype is "{datatype}"; it takes BF16, FP16 or FP32')
    require(is_float or datatype == "BF16", f"hidden is of uint16, which can only be sent as BF16, not as {datatype}")
    if is_float and datatype == "BF16":
        return datatype, to_bf16(hidden)
    return datatype, np.ascontiguousarray(hidden, NUMPY_OF[datatype])


def encode_routing(expert_ids, expert_weights, rows):
    ids, weights = np.asarray(expert_ids), np.asarray(expert_weights)
    require(ids.ndim == 2 and ids.shape[0] == rows, f"expert_ids has shape {ids.shape}; with {rows} rows it takes [{rows}, K]")
    require(np.issubdtype(ids.dtype, np.integer), f"expert_ids is of {ids.dtype}; it takes integers")
    require(not ids.size or (ids.min() >= -1 and ids.max() < 2**31), "expert_ids has numbers below -1 or past 32 bits")
    require(weights.shape == ids.shape, f"expert_weights has shape {weights.shape}, expert_ids {ids.shape}; they must be the same")
    require(weights.dtype.kind in "fiu", f"expert_weights is of {weights.dtype}; it takes floats")
    return np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(weights, np.float32)


def encode_adapters(adapters, rows):
    require(not isinstance(adapters, (str, bytes)), "adapters takes a list with one name for each row")
    adapters = list(adapters)
    require(len(adapters) == rows, f"adapters has {len(adapters)} names for {rows} rows")
    require(all(isinstance(name, str) for name in adapters), 'adapters takes strings, "" for none')
    names = [name.encode() for name in adapters]
    return b"".join(struct.pack("<I", len(name)) + name for name in names)


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def make_connection(url, timeout):
    """url: http://HOST:PORT, HOST:PORT, or unix:PATH as the server's --listen takes it."""
    if url.startswith("unix:"):
        require(len(url) > 5, "unix: takes the path of a socket behind it")
        return UnixConnection(url[5:], timeout)
    parts = urllib.parse.urlsplit(url if "://" in url else "http://" + url)
    require(parts.scheme == "http", f"{url}: the server speaks plain HTTP: http://HOST:PORT or unix:PATH")
    require(parts.hostname and parts.path in ("", "/") and not parts.query, f"{url}: not http://HOST:PORT or unix:PATH")
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)


class Client:
    def __init__(self, url="http://127.0.0.1:8080", key=None, timeout=60):
        self.connection = make_connection(url, timeout)
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    def call(self, method, path, body=None, headers=None):
        # Between two calls a server says nothing: what can be read is its end of the connection, idle for too long or restarted.
        if self.connection.sock:
            poll = select.poll()
            poll.register(self.connection.sock, select.POLLIN)
            if poll.poll(0):
                self.connection.close()
        try:
            self.connection.request(method, path, body, {**self.headers, **(headers or {})})
            response = self.connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException):
            self.connection.close()
            raise
        if response.status >= 300:
            raise Failure(response.status, data)
        return response, data

    def get(self, path):
        return json.loads(self.call("GET", path)[1])

    def forward(self, hidden, expert_ids, expert_weights, layer=None, adapters=None, mode="auto", datatype=None):
        """One POST /moe/forward; returns the output [T, H] and the reply's parameters (path, rows, queue_us, compute_us)."""
        datatype, hidden = encode_hidden(hidden, datatype)
        rows = hidden.shape[0]
        expert_ids, expert_weights = encode_routing(expert_ids, expert_weights, rows)
        tensors = [("hidden", datatype, hidden.shape, hidden.tobytes()),
                   ("expert_ids", "INT32", expert_ids.shape, expert_ids.tobytes()),
                   ("expert_weights", "FP32", expert_weights.shape, expert_weights.tobytes())]
        if adapters is not None:
            tensors.append(("adapter", "BYTES", [rows], encode_adapters(adapters, rows)))
        parameters = {"mode": mode, "binary_data_output": True}
        if layer is not None:
            parameters["layer"] = layer
        head = json.dumps({"parameters": parameters,
                           "inputs": [{"name": name, "datatype": kind, "shape": list(shape), "parameters": {"binary_data_size": len(raw)}}
                                      for name, kind, shape, raw in tensors]}).encode()
        response, data = self.call("POST", "/moe/forward", head + b"".join(raw for *_, raw in tensors),
                                   {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))})
        length = int(response.getheader("Inference-Header-Content-Length"))
        reply = json.loads(data[:length])
        output = reply["outputs"][0]
        values = np.frombuffer(data, NUMPY_OF[output["datatype"]], offset=length).reshape(output["shape"])
        return values, reply["parameters"]


def read_safetensors(path):
    """The tensors of a small file: float32 and int32 as such, bfloat16 as bits."""
    with open(path, "rb") as file:
        data = file.read()
    length = struct.unpack("<Q", data[:8])[0]
    kinds = {"F32": np.float32, "I32": np.int32, "BF16": np.uint16}
    tensors = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def fixture_batch(client, folder):
    """Rows of a fixture's first layer, each with the next of: no adapter, then each one installed."""
    golden = read_safetensors(os.path.join(folder, "golden.safetensors"))
    layer = min(int(name[5:].split(".")[0]) for name in golden)
    golden = {name.split(".", 1)[1]: values for name, values in golden.items() if name.startswith(f"layer{layer}.")}
    names = [a["name"] for a in client.get("/adapters")["adapters"] if "expected_" + a["name"] in golden]
    rows = golden["hidden"].shape[0]
    adapters = [([""] + names)[t % (len(names) + 1)] for t in range(rows)]
    want = np.stack([golden["expected_" + name if name else "expected"][t] for t, name in enumerate(adapters)])
    return layer, golden["hidden"], golden["expert_ids"], golden["expert_weights"], adapters, want


def random_batch(client, rows=8):
    model = client.get("/moe/model")
    held = model["layers"]
    layer = held[0] if isinstance(held, list) else 0
    random = np.random.default_rng()
    experts, k = model["experts"], model.get("top_k") or 2
    ids = np.stack([random.permutation(experts)[:k] for _ in range(rows)])
    weights = random.random((rows, k))
    weights /= weights.sum(axis=1, keepdims=True)
    return layer, to_bf16(random.standard_normal((rows, model["hidden_size"]))), ids, weights, None, None


def main():
    parser = argparse.ArgumentParser(description="Posts a batch to a running expertd and says what came back.")
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--fixture", help="folder of tests/fixtures that the server serves")
    parser.add_argument("--key-file", help="file with the API key")
    arguments = parser.parse_args()
    key = None
    if arguments.key_file:
        with open(arguments.key_file, encoding="utf-8") as file:
            key = file.readline().strip()
    client = Client(arguments.url, key)
    try:
        client.get("/health/live")
    except OSError as error:
        sys.exit(f"example_client.py: {arguments.url}: {error}")
    layer, hidden, ids, weights, adapters, want = fixture_batch(client, arguments.fixture) if arguments.fixture else random_batch(client)
    started = time.perf_counter()
    out, info = client.forward(hidden, ids, weights, layer=layer, adapters=adapters, datatype="BF16")
    elapsed_us = (time.perf_counter() - started) * 1e6
    used = sorted(set(adapters or []) - {""})
    print(f"rows      {info['rows']} of {hidden.shape[1]} values, {ids.shape[1]} experts a row, layer {info['layer']}")
    print(f"adapters  {', '.join(used) or 'none'}" + (f"; {adapters.count('')} rows without" if used else ""))
    print(f"path      {info['path']}")
    print(f"timing    {elapsed_us:.0f} us in all; queue {info['queue_us']} us, compute {info['compute_us']} us")
    if want is None:
        return 0
    error = float(np.linalg.norm(from_bf16(out) - want) / np.linalg.norm(want))
    limit = 7e-3 if used else 4e-3
    print(f"error     {error:.1e} relative to float64 (limit {limit:.0e})")
    return 0 if error <= limit else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, OSError, ValueError, http.client.HTTPException) as failure:
        sys.exit(f"example_client.py: {failure}")

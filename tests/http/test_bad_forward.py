# SPDX-License-Identifier: Apache-2.0
"""Malformed infer requests: each gets its status, its code and a sentence that names what is wrong; the server goes on."""
import json
import struct

from harness import *

NAN, INF = float("nan"), float("inf")


def change(which, datatype=None, shape=None, data=None, name=None):
    """tokens() with one tensor changed."""
    t = tokens()
    n, d, sh, da = t[which]
    t[which] = (name or n, d if datatype is None else datatype, shape if shape is not None else sh, data if data is not None else da)
    return t


def bad(server, tensors, status, code, *words, binary=None, parameters=None, **top):
    for b in ((False, True) if binary is None else (binary,)):
        check_error(forward(server, tensors, b, parameters, **top), status, code, *words)


def raw(server, text, status, code, *words, headers=None):
    check_error(server.call("POST", "/moe/forward", text if isinstance(text, bytes) else text.encode(), headers or {}), status, code, *words)


def test_inputs():
    with Server() as s:
        t = tokens()
        for missing in range(3):
            bad(s, [x for i, x in enumerate(t) if i != missing], 400, "bad_request", t[missing][0], "missing")
        for twice in range(3):
            r = forward(s, t + [t[twice]])
            assert r.status == 400 and t[twice][0] in r.json()["error"], r
        bad(s, t + [("extra", "FP32", [1], [1.0])], 400, "bad_request", 'unknown input "extra"; there are hidden, expert_ids', "sorted_weights")
        bad(s, t + [("x" * 128, "FP32", [1], [1.0])], 400, "bad_request", "there are hidden, expert_ids", "sorted_weights")
        bad(s, [("x" * 500, "FP32", [1], [1.0])] + t, 400, "bad_request")
        assert forward(s, [], False).status == 400
        many = [(f"i{i}", "FP32", [1], [1.0]) for i in range(40)]
        assert forward(s, many).status == 400
        assert forward(s, t).status == 200


def test_shapes():
    with Server("--queue-rows", "100") as s:
        bad(s, change(0, shape=[0, 64], data=[]), 400, "shape_mismatch", "hidden")
        bad(s, change(0, shape=[128]), 400, "shape_mismatch", "hidden")
        bad(s, change(0, shape=[2, 2, 32]), 400, "shape_mismatch", "hidden")
        bad(s, change(0, shape=[4, 32]), 400, "shape_mismatch", "hidden", "64", "32")
        # Whatever its data: that there is too much of it would be no help to whoever took H for 63.
        for wrong in ([2, 63], [2, 65], [3, 64, 1], [64]):
            bad(s, change(0, shape=wrong, data=[0.5] * 128), 400, "shape_mismatch", "hidden", str(wrong), "[T, 64]")
        bad(s, change(0, shape=[3, 64], data=[0.5] * 128), 400, "bad_tensor", "hidden", "3,64")
        bad(s, change(1, shape=[2, 0], data=[]), 400, "shape_mismatch", "expert_ids", "K = 0")
        bad(s, change(1, shape=[4]), 400, "shape_mismatch", "expert_ids")
        bad(s, change(1, shape=[1, 4]), 400, "shape_mismatch", "expert_ids", "1, 4")
        bad(s, change(2, shape=[4, 1]), 400, "shape_mismatch", "expert_weights", "4, 1")
        k9 = tokens(k=9)
        bad(s, k9, 400, "shape_mismatch", "K = 9", "8")
        assert forward(s, tokens(k=8)).status == 200 and forward(s, tokens(k=1)).status == 200
        bad(s, change(0, shape=[2**40, 2**40], data=[1.0]), 400, "bad_tensor")
        r = forward(s, change(0, shape=[2**31, 2**31, 2**31], data=[1.0]))
        assert r.status == 400, r
        for shape in ([-1, 64], [2.5, 64], ["2", 64], [[2, 64]], 128, None, [2, 64, 1, 1, 1, 1, 1, 1, 1], [1e400], [10**30, 64]):
            t = {"name": "hidden", "datatype": "FP32", "shape": shape, "data": [0.0] * 128}
            text = json.dumps({"inputs": [t]}).replace("Infinity", "1e400")
            r = s.call("POST", "/moe/forward", text.encode())
            assert r.status == 400, (shape, r)
        bad(s, tokens(rows=101), 413, "too_large", "101", "100")
        assert forward(s, tokens(rows=100)).status == 200


def test_datatypes():
    with Server() as s:
        bad(s, change(0, datatype="INT32", data=[1] * 128), 400, "unsupported_datatype", "hidden", "INT32")
        bad(s, change(1, datatype="FP32", data=[1.0] * 4), 400, "unsupported_datatype", "expert_ids", "FP32")
        bad(s, change(2, datatype="INT32", data=[1] * 4), 400, "unsupported_datatype", "expert_weights", "INT32")
        for kind in ("FP64", "UINT8", "BOOL", "fp32", "", "FP32 ", "\u0000"):
            r = forward(s, change(0, datatype=kind))
            assert r.status == 400 and r.json()["code"] in ("unsupported_datatype", "bad_request", "bad_json"), (kind, r)
        bad(s, tokens() + [("adapter_id", "FP32", [2], [1.0, 1.0])], 400, "unsupported_datatype", "adapter_id")
        bad(s, tokens() + [("adapter", "INT32", [2], [1, 1])], 400, "unsupported_datatype", "adapter")


def test_values():
    with Server() as s:
        for kind in ("INT32", "INT64"):
            for v in (8, -2, 2**31 - 1, -2**31) + ((2**31, 2**32, 2**32 + 1, -2**63, 2**63 - 1) if kind == "INT64" else ()):
                bad(s, change(1, datatype=kind, data=[0, 1, v, 1]), 400, "expert_out_of_range", "row 1, slot 0", str(v))
        for v, word in ((NAN, "NaN"), (INF, "Infinity"), (-INF, "-Infinity")):
            bad(s, change(2, data=[0.5, v, 0.5, 0.5]), 400, "non_finite_weight", "row 0, slot 1", word, binary=True)
        for number in ("1e39", "-1e39", "1e999"):
            text = json.dumps({"inputs": [tensor(*x)[0] for x in change(2, data=[123.0, 0, 0, 0])]}).replace("123.0", number)
            r = s.call("POST", "/moe/forward", text.encode())
            assert r.status == 400, r
        for number in ("2147483648", "1.5", "1e2", "-2147483649", "\"1\"", "null", "true"):
            text = json.dumps({"inputs": [tensor(*x)[0] for x in change(1, data=[777, 0, 0, 0])]}).replace("777", number)
            r = s.call("POST", "/moe/forward", text.encode())
            assert r.status == 400, (number, r)
        # All slots skipped: zeros, whatever the hidden state, and NaN stays out.
        t = change(1, data=[-1, -1, -1, -1])
        t[0][3][:] = [NAN] * 128
        r = forward(s, t, binary=True, parameters={"binary_data_output": True})
        assert r.status == 200 and r.body[-512:] == bytes(512), r


def test_json():
    good = json.dumps({"inputs": [tensor(*t)[0] for t in tokens()]})
    with Server() as s:
        for text in ("", "{", "[]", "null", "1", "\"x\"", good + "x", good + good, good[:-1], good.replace("{", "{,", 1), "{'a':1}", "\ufeff" + good,
                     good.replace("[", "[,", 1), "{\"inputs\":[01]}", "{\"inputs\":\"a\nb\"}"):
            r = s.call("POST", "/moe/forward", text.encode())
            assert r.status == 400 and r.json()["code"] in ("bad_json", "bad_request"), (text[:40], r)
        raw(s, b"{\"id\":\"\xff\xfe\"}", 400, "bad_json")
        raw(s, b"{\"inputs\":[]}\x00", 400, "bad_json")
        raw(s, b"\x00" + good.encode(), 400, "bad_json")
        raw(s, "[" * 100000, 400, "bad_json")
        raw(s, "{\"a\":" * 5000 + "1" + "}" * 5000, 400, "bad_json")
        r = s.call("POST", "/moe/forward", ("{\"inputs\":[{\"name\":\"hidden\",\"data\":" + "[" * 3000 + "]" * 3000 + "}]}").encode())
        assert r.status == 400, r
        raw(s, "{\"inputs\":[],\"inputs\":[]}", 400, "bad_json")
        r = s.call("POST", "/moe/forward", good.replace("\"name\": \"hidden\"", "\"name\": \"hidden\", \"name\": \"hidden\"").encode())
        check_error(r, 400, "bad_json")
        for top in ({"id": 5}, {"inputs": {}}, {"parameters": []}, {"parameters": {"layer": "0"}}, {"parameters": {"layer": 0.5}},
                    {"parameters": {"mode": "fast"}}, {"parameters": {"mode": 1}}, {"parameters": {"adapter": 5}}, {"outputs": {}},
                    {"outputs": [{"name": "other"}]}, {"parameters": {"binary_data_output": "yes"}}):
            text = json.dumps({**json.loads(good), **top})
            r = s.call("POST", "/moe/forward", text.encode())
            assert r.status == 400 and r.json()["code"] == "bad_request", (top, r)
        assert s.call("POST", "/moe/forward", json.dumps({**json.loads(good), "parameters": {"sequence_id": 1, "priority": "x", "nested": {"a": []}}}).encode()).status == 200
        assert s.call("POST", "/moe/forward", b" \r\n\t" + good.encode() + b"\n").status == 200
        nested = json.loads(good)
        nested["inputs"][0]["data"] = [nested["inputs"][0]["data"][:64], nested["inputs"][0]["data"][64:]]
        assert s.call("POST", "/moe/forward", nested).status == 200
        for data in ([[0.0] * 128], [[0.0] * 63, [0.0] * 65], [0.0] * 127, [0.0] * 129, [[0.0] * 64, 0.0], "x", {}, None, 5):
            nested["inputs"][0]["data"] = data
            r = s.call("POST", "/moe/forward", nested)
            assert r.status == 400 and r.json()["code"] in ("bad_tensor", "bad_request", "shape_mismatch", "bad_json"), (data, r)


def test_binary_sizes():
    with Server() as s:
        body, headers = forward_body(tokens(), binary=True)
        n = int(headers["Inference-Header-Content-Length"])

        def send(b, length, *words, code=None):
            r = s.call("POST", "/moe/forward", b, {"Inference-Header-Content-Length": str(length)})
            assert r.status == 400 and r.json()["code"] in ((code,) if code else ("bad_request", "bad_tensor", "bad_json")), r

        send(body[:-1], n)
        send(body + b"x", n)
        send(body, n + 1)
        send(body, n - 1)
        send(body, 0)
        send(body, len(body) + 1)
        send(body, 10**17)
        for text in ("x", "-1", "", "1 2", "0x10", "1" * 30, "+5"):
            r = s.call("POST", "/moe/forward", body, {"Inference-Header-Content-Length": text})
            check_error(r, 400, "bad_request")
        for size in (0, 511, 513, -1, 2**63, 2**64, 1.5, "512", None):
            head = json.loads(body[:n])
            head["inputs"][0]["parameters"]["binary_data_size"] = size
            text = json.dumps(head).encode()
            r = s.call("POST", "/moe/forward", text + body[n:], {"Inference-Header-Content-Length": str(len(text))})
            assert r.status == 400, (size, r)
        head = json.loads(body[:n])
        head["inputs"][0]["data"] = [0.0] * 128  # both ways at once
        text = json.dumps(head).encode()
        assert s.call("POST", "/moe/forward", text + body[n:], {"Inference-Header-Content-Length": str(len(text))}).status == 400
        # The C++ client sends the header for pure JSON, too; JSON and binary may be mixed.
        plain, _ = forward_body(tokens())
        assert s.call("POST", "/moe/forward", plain, {"Inference-Header-Content-Length": str(len(plain))}).status == 200
        t = tokens()
        made = [tensor(*t[0], binary=True), tensor(*t[1]), tensor(*t[2], binary=True)]
        text = json.dumps({"inputs": [m for m, _ in made]}).encode()
        r = s.call("POST", "/moe/forward", text + b"".join(b for _, b in made), {"Inference-Header-Content-Length": str(len(text))})
        assert r.status == 200 and r.json()["outputs"][0]["data"] == forward(s, t).json()["outputs"][0]["data"], r


def grouped(ids, weights, rows, k, experts):
    """(sorted_token_ids, expert_counts, sorted_weights) of the same routing."""
    pairs = sorted((ids[i], i) for i in range(rows * k) if ids[i] >= 0)
    return ([i // k for _, i in pairs], [sum(1 for e, _ in pairs if e == x) for x in range(experts)], [weights[i] for _, i in pairs])


def test_grouped_routing():
    with Server() as s:
        t = tokens(rows=5, k=3)
        ids = [0, 3, 7, 1, 1, 5, 2, 4, 6, 0, 1, 2, 7, 7, 7]  # ascending in each row, so that slot order is the same
        t[1] = ("expert_ids", "INT32", [5, 3], ids)
        tok, cnt, w = grouped(ids, t[2][3], 5, 3, 8)
        for kind in ("INT32", "INT64"):
            for mode in ("decode", "prefill"):
                p = {"binary_data_output": True, "mode": mode}
                g = [t[0], ("sorted_token_ids", kind, [15], tok), ("expert_counts", kind, [8], cnt), ("sorted_weights", "FP32", [15], w)]
                a, b = forward(s, t, True, p), forward(s, g, True, p)
                assert a.status == b.status == 200, (a, b)
                assert a.body[-5 * 256:] == b.body[-5 * 256:], mode
        g = lambda tok=tok, cnt=cnt, w=w: [t[0], ("sorted_token_ids", "INT64", [len(tok)], tok), ("expert_counts", "INT64", [len(cnt)], cnt), ("sorted_weights", "FP32", [len(w)], w)]
        # Uneven ownership and no entry at all.
        r = forward(s, g(tok=[0, 0, 4], cnt=[1, 0, 2, 0, 0, 0, 0, 0], w=[1.0, 1.0, 1.0]), True, {"binary_data_output": True})
        assert r.status == 200 and r.body[-4 * 256:-256] == bytes(3 * 256) and r.body[-256:] != bytes(256), r
        r = forward(s, g(tok=[], cnt=[0] * 8, w=[]), True, {"binary_data_output": True})
        assert r.status == 200 and r.body[-5 * 256:] == bytes(5 * 256), r
        for missing in (1, 2, 3):
            x = g()
            name = x.pop(missing)[0]
            bad(s, x, 400, "bad_request", name, "missing")
        bad(s, g() + [t[1]], 400, "bad_request", "mixture")
        bad(s, g() + [t[2]], 400, "bad_request", "mixture")
        bad(s, t + [g()[1]], 400, "bad_request", "mixture")
        bad(s, g(cnt=cnt[:7]), 400, "shape_mismatch", "expert_counts", "8")
        bad(s, g(w=w[:-1]), 400, "shape_mismatch", "sorted_weights")
        bad(s, g(cnt=[c + (i == 0) for i, c in enumerate(cnt)]), 400, "bad_request", "expert_counts")
        bad(s, g(cnt=[c - (i == 7) for i, c in enumerate(cnt)]), 400, "bad_request", "expert_counts", "sum")
        bad(s, g(cnt=[-1, cnt[0] + cnt[1] + 1] + cnt[2:]), 400, "bad_request", "expert_counts[0]", "-1")
        bad(s, g(cnt=[2**62, 2**62, 2**62, 2**62, 15, 0, 0, 0]), 400, "bad_request", "expert_counts[0]")
        for v in (-1, 5, 2**32, -2**63):
            bad(s, g(tok=[v] + tok[1:]), 400, "bad_request", "sorted_token_ids[0]", str(v))
        bad(s, g(tok=[0] * 15), 400, "bad_request", "row 0", "8")
        bad(s, g(w=[NAN] + w[1:]), 400, "non_finite_weight", "sorted_weights", "entry 0", binary=True)


def many_layers(folder, layers):
    """A checkpoint in which every layer is olmoe's first one."""
    source = fixture("olmoe")
    with open(os.path.join(source, "model.safetensors"), "rb") as f:
        head = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    made, blob, at = {}, [], 0
    for layer in range(layers):
        for name, t in head.items():
            if name.startswith("model.layers.0.mlp.experts."):
                piece = data[t["data_offsets"][0]:t["data_offsets"][1]]
                made[name.replace("layers.0.", f"layers.{layer}.", 1)] = {**t, "data_offsets": [at, at + len(piece)]}
                blob.append(piece)
                at += len(piece)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        text = json.dumps(made).encode()
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blob))
    with open(os.path.join(source, "config.json")) as f, open(os.path.join(folder, "config.json"), "w") as g:
        json.dump({**json.load(f), "num_hidden_layers": layers}, g)


def test_held_layers_are_told():
    folder = tempfile.mkdtemp()
    many_layers(folder, 130)
    for keep, told in (("0-2,5,7-8,10", "held are 0-2,5,7-8,10"), (",".join(str(i) for i in range(0, 128, 2)), ",...")):
        with Server("--model", folder, "--layers", keep) as s:
            hidden = s.call("GET", "/moe/model").json()["hidden_size"]
            r = forward(s, tokens(hidden=hidden), parameters={"layer": 129})
            check_error(r, 404, "layer_not_found", "layer 129", told)
            assert r.json()["error"].endswith(told), r
    shutil.rmtree(folder)


def test_layers_and_adapters():
    with Server("--synthetic", "E=8,K=2,H=64,I=64,L=2") as s:
        bad(s, tokens(), 400, "bad_request", "layer")
        for layer in (2, 2**31 - 1):
            bad(s, tokens(), 404, "layer_not_found", str(layer), "held are 0-1", parameters={"layer": layer})
        for layer in (-1, 2**31, 2**32, 2**40, -2**63):
            bad(s, tokens(), 400, "bad_request", str(layer), parameters={"layer": layer})
        a, b = (forward(s, tokens(), parameters={"layer": n}).json() for n in (0, 1))
        assert a["parameters"]["layer"] == 0 and b["parameters"]["layer"] == 1 and a["outputs"] != b["outputs"]
        p = {"layer": 0}
        bad(s, tokens(), 404, "adapter_not_found", "nobody", parameters={**p, "adapter": "nobody"})
        bad(s, tokens() + [("adapter", "BYTES", [2], ["", "who"])], 404, "adapter_not_found", "who", "row 1", parameters=p)
        for v in (0, -2, 5, 2**31 - 1):
            bad(s, tokens() + [("adapter_id", "INT32", [2], [-1, v])], 404, "adapter_not_found", str(v), "row 1", parameters=p)
        for v in (2**32, -2**33, 2**63 - 1):
            bad(s, tokens() + [("adapter_id", "INT64", [2], [v, -1])], 404, "adapter_not_found", str(v), "row 0", parameters=p)
        bad(s, tokens() + [("adapter_id", "INT32", [3], [-1] * 3)], 400, "shape_mismatch", "adapter_id", parameters=p)
        bad(s, tokens() + [("adapter", "BYTES", [2, 1], ["", ""])], 400, "shape_mismatch", "adapter", parameters=p)
        bad(s, tokens() + [("adapter", "BYTES", [2], ["", ""]), ("adapter_id", "INT32", [2], [-1, -1])], 400, "bad_request", "only one", parameters=p)
        bad(s, tokens() + [("adapter", "BYTES", [2], ["", ""])], 400, "bad_request", "only one", parameters={**p, "adapter": "x"})
        base = forward(s, tokens(), parameters=p).json()["outputs"]
        for extra in ([("adapter", "BYTES", [2], ["", ""])], [("adapter_id", "INT64", [2], [-1, -1])]):
            for binary in (False, True):
                assert forward(s, tokens() + extra, binary, p).json()["outputs"] == base
        body, headers = forward_body(tokens() + [("adapter", "BYTES", [2], ["abc", "def"])], True, p)
        n = len(body)
        for raw_bytes in (b"\xff\xff\xff\xff" + body[n - 10:], b"\x00\x00\x00\x00" + body[n - 10:], b"\x07\x00\x00\x00" + body[n - 10:]):
            r = s.call("POST", "/moe/forward", body[:n - 14] + raw_bytes, headers)
            assert r.status == 400, r


def test_long_json_is_bounded_and_holds_nobody_up():
    """Tensors from JSON count as memory in flight, and are scanned where no other connection waits for it."""
    with Server("--max-inflight-bytes", "24M", "--max-body-bytes", "64M") as server:
        ids = b",".join([b"0"] * 4_000_000)
        body = b'{"inputs":[{"name":"expert_ids","datatype":"INT64","shape":[4000000],"data":[' + ids + b"]}]}"
        check_error(server.call("POST", "/moe/forward", body), 413, "too_large", "--max-inflight-bytes", str(len(body) + 32000000))
        ids = b",".join([b"0"] * 2_000_000)
        body = b'{"inputs":[{"name":"expert_ids","datatype":"INT64","shape":[2000000],"data":[' + ids + b"]}]}"
        check_error(server.call("POST", "/moe/forward", body), 400, "bad_request", "hidden")
        # An answer so long that it is written elsewhere, too, has the same numbers as a binary one.
        t = tokens(rows=4096)
        text = forward(server, t)
        binary = forward(server, t, binary=True, parameters={"binary_data_output": True})
        assert text.status == 200 and binary.status == 200, (text.status, binary.status)
        raw = binary.body[int(binary.headers["inference-header-content-length"]):]
        assert struct.pack(f"<{4096 * 64}f", *text.json()["outputs"][0]["data"]) == raw
        assert forward(server, tokens()).status == 200


def test_long_heads():
    """A binary reply is whole however long the head in front of its tensor is."""
    with Server() as server:
        first = None
        for rows in (1, 2, 200):
            for length in (1, 50, 250, 300, 500, 600, 5000, 200000):
                r = forward(server, tokens(rows=rows), binary=True, parameters={"binary_data_output": True}, id="i" * length)
                at = int(r.headers["inference-header-content-length"])
                assert r.status == 200 and len(r.body) == at + rows * 64 * 4 and json.loads(r.body[:at])["id"] == "i" * length, (rows, length)
                first = r.body[at:] if length == 1 else first
                assert r.body[at:] == first, (rows, length)


run(globals())

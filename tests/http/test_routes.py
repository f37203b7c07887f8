# SPDX-License-Identifier: Apache-2.0
"""Every route: what it answers, in which shape; methods, unknown paths, HEAD, keep-alive, request ids, escapes."""
import json

from harness import *


def test_forward_json():
    with Server() as s:
        r = forward(s, tokens(), id="abc")
        assert r.status == 200, r
        j = r.json()
        assert j["model_name"] == "synthetic" and j["model_version"] == "1" and j["id"] == "abc", j
        p = j["parameters"]
        assert p["path"] in ("decode", "prefill") and p["layer"] == 0 and p["rows"] == 2 and p["queue_us"] >= 0 and p["compute_us"] >= 0, p
        out = j["outputs"][0]
        assert out["name"] == "hidden" and out["datatype"] == "FP32" and out["shape"] == [2, 64] and len(out["data"]) == 128, out
        assert r.headers["content-type"].startswith("application/json"), r


def test_forward_binary_equals_json():
    with Server() as s:
        r = forward(s, tokens(), binary=True, parameters={"binary_data_output": True})
        assert r.status == 200 and r.headers["content-type"] == "application/octet-stream", r
        n = int(r.headers["inference-header-content-length"])
        out = json.loads(r.body[:n])["outputs"][0]
        size = out["parameters"]["binary_data_size"]
        assert "data" not in out and size == 2 * 64 * 4 and len(r.body) == n + size, r
        values = list(struct.unpack(f"<{128}f", r.body[n:]))
        plain = forward(s, tokens()).json()["outputs"][0]["data"]
        assert [struct.unpack("<f", struct.pack("<f", v))[0] for v in plain] == values
        # Asked for by the output's own entry.
        r = forward(s, tokens(), outputs=[{"name": "hidden", "parameters": {"binary_data": True}}])
        assert r.status == 200 and r.body.endswith(struct.pack("<128f", *values)), r


def test_oip_paths():
    with Server("--model-name", "my/moe") as s:
        for path in ("/v2/models/my%2Fmoe/infer", "/v2/models/my%2Fmoe/versions/1/infer", "/v2/models/my%2fmoe/infer"):
            r = forward(s, tokens(), path=path)
            assert r.status == 200 and r.json()["model_name"] == "my/moe", r
        check_error(forward(s, tokens(), path="/v2/models/other/infer"), 404, "model_not_found", "other", "my/moe")
        check_error(forward(s, tokens(), path="/v2/models/my%2Fmoe/versions/2/infer"), 404, "model_not_found", "2")
        for path in ("/v2/models/nope", "/v2/models/nope/config", "/v2/models/nope/stats", "/v2/models/nope/ready"):
            check_error(s.call("GET", path), 404, "model_not_found", "nope")


def test_descriptions():
    with Server("--model-name", "m") as s:
        for path in ("/v2", "/v2/"):
            j = s.call("GET", path).json()
            assert j["name"] == "expertd" and j["version"] and "binary_tensor_data" in j["extensions"], j
        for path in ("/v2/models/m", "/v2/models/m/versions/1"):
            j = s.call("GET", path).json()
            assert j["name"] == "m" and j["versions"] == ["1"] and j["platform"], j
            assert {"name": "hidden", "datatype": "FP32", "shape": [-1, 64]} in j["inputs"] and j["outputs"][0]["shape"] == [-1, 64], j
        j = s.call("GET", "/v2/models/m/config").json()
        assert j["max_batch_size"] == 0 and {"name": "adapter", "data_type": "TYPE_STRING", "dims": [-1], "optional": True} in j["input"], j
        assert j["instance_group"][0]["kind"] == "KIND_CPU", j
        for path in ("/v2/models/m/ready", "/v2/models/m/versions/1/ready", "/v2/health/ready", "/v2/health/live", "/health/ready", "/health/live"):
            assert s.call("GET", path).status == 200, path
        before = s.call("GET", "/v2/models/m/stats").json()["model_stats"][0]
        assert forward(s, tokens(rows=3)).status == 200
        stats = lambda: s.call("GET", "/v2/models/stats").json()["model_stats"][0]
        end = time.monotonic() + 10 * SLOW
        while stats()["inference_stats"]["success"]["count"] < 1 and time.monotonic() < end:
            time.sleep(0.01)  # a request counts once its answer is out
        after = stats()
        assert after["inference_count"] - before["inference_count"] == 3 and after["execution_count"] > before["execution_count"], after
        assert after["inference_stats"]["success"]["count"] == 1 and after["last_inference"] > 1e12 and after["name"] == "m", after
        for field in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"):
            assert set(after["inference_stats"][field]) == {"count", "ns"}, after
        page = s.call("GET", "/metrics").body.decode()
        for field, family in (("success", "request"), ("queue", "queue"), ("compute_input", "compute_input"), ("compute_infer", "compute_infer"),
                              ("compute_output", "compute_output")):
            us = int(re.search(rf"^nv_inference_{family}_duration_us{{.*}} (\d+)$", page, re.M).group(1))
            assert us == after["inference_stats"][field]["ns"] // 1000 and (us or field == "queue"), (field, us, after)
        # Triton's clients send these with no body and a form's content type.
        r = s.call("POST", "/v2/repository/index", b"", {"Content-Type": "application/x-www-form-urlencoded"})
        assert r.json() == [{"name": "m", "version": "1", "state": "READY", "reason": ""}], r
        assert s.raw(b"POST /v2/repository/index HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200"), "no length at all"
        assert s.call("POST", "/v2/repository/index", {"ready": True}).status == 200
        check_error(s.call("POST", "/v2/repository/index", b"{"), 400, "bad_json")
        j = s.call("GET", "/moe/model").json()
        assert (j["layers"], j["experts"], j["experts_held"], j["top_k"]) == ([0], 8, list(range(8)), 2), j
        assert (j["hidden_size"], j["intermediate_size"], j["weight_format"], j["device"]) == (64, 64, "BF16", "cpu"), j
        assert j["weight_bytes"] >= 8 * 3 * 64 * 64 * 2 and j["scratch_bytes"] > 0 and j["family"] == "synthetic", j


def test_metrics_and_openapi():
    with Server() as s:
        forward(s, tokens())
        r = s.call("GET", "/metrics")
        assert r.status == 200 and r.headers["content-type"].startswith("text/plain; version=0.0.4"), r
        assert b"process_" in r.body and b"nv_inference_" in r.body, r
        r = s.call("GET", "/openapi.json")
        api = r.json()
        assert api["openapi"].startswith("3.1") and r.headers["content-type"] == "application/json", r
        # Every documented path is served and takes exactly the documented methods.
        for path, item in api["paths"].items():
            made = path.replace("{name}", "x").replace("{model}", "synthetic").replace("{version}", "1")
            got = s.call("PATCH", made)
            assert got.status == 405, (path, got)
            allowed = {m.lower() for m in got.headers["allow"].split(", ")} - {"head"}
            assert allowed == set(item) & {"get", "put", "post", "delete"}, (path, allowed, list(item))
        for path in ("/moe/forward", "/adapters/{name}", "/v2/models/{model}/infer", "/v1/load_lora_adapter", "/health/ready"):
            assert path in api["paths"], path
        codes = """bad_json bad_request bad_tensor shape_mismatch unsupported_datatype expert_out_of_range non_finite_weight bad_adapter
            adapter_unsupported bad_framing unauthorized forbidden forbidden_path not_found model_not_found layer_not_found adapter_not_found
            method_not_allowed timeout adapter_exists too_large unsupported_media_type non_finite_output queue_full too_many_bytes_in_flight
            internal not_ready draining device_failed too_many_connections deadline_exceeded out_of_device_memory adapter_slots_full"""
        absent = [code for code in codes.split() if not re.search(rf"\b{code}\b", r.body.decode())]
        assert not absent, absent
        references = re.findall(r'"\$ref":"#/([^"]+)"', r.body.decode())
        for reference in set(references):
            node = api
            for key in reference.split("/"):
                node = node[key]


def test_shares_of_experts():
    """Two servers with half of the experts each: ids are those of the whole model, what is not held adds nothing, the halves add up."""
    def run_one(*options):
        with Server(*options, fixture_name="olmoe") as s:
            m = s.call("GET", "/moe/model").json()
            n, p = m["experts"], {"layer": m["layers"][0]}
            t = tokens(6, m["hidden_size"], 2, n)

            def routed(ids):
                return forward(s, [t[0], (*t[1][:3], ids), t[2]], parameters=p)

            check_error(routed([0, n] + [0] * 10), 400, "expert_out_of_range", "row 0, slot 1", str(n), f"-1 to {n - 1}")
            return n, m["experts_held"], *(r.json()["outputs"][0]["data"] for r in (routed(t[1][3]), routed([n - 1] * 12)))

    n, held, whole, last = run_one()
    _, held_low, low, nothing = run_one("--experts", f"0-{n // 2 - 1}")
    _, held_high, high, last_again = run_one("--experts", f"{n // 2}-{n - 1}")
    assert held == held_low + held_high == list(range(n)) and len(held_low) == n // 2
    assert not any(nothing) and any(last) and last_again == last
    assert any(low) and any(high) and max(abs(a + b - c) for a, b, c in zip(low, high, whole)) < 1e-5 * max(map(abs, whole))


def test_methods_and_paths():
    with Server() as s:
        for method, path, allow in (("GET", "/moe/forward", "POST"), ("POST", "/moe/model", "GET, HEAD"), ("DELETE", "/adapters", "GET, HEAD, POST"),
                                    ("POST", "/adapters/a", "GET, HEAD, PUT, DELETE"), ("BREW", "/metrics", "GET, HEAD"), ("OPTIONS", "/v2", "GET, HEAD")):
            r = s.call(method, path)
            check_error(r, 405, "method_not_allowed", method)
            assert r.headers["allow"] == allow, r
        for path in ("/", "/nope", "/moe", "/moe/forward/", "/adapters/", "/adapters/a/b", "/v2/models/", "/v2/models/synthetic/nope", "//moe/model",
                     "/a/b/c/d/e/f/g/h/i/j", "/v2//health/live"):
            check_error(s.call("GET", path), 404, "not_found")
        assert s.call("GET", "/moe%2fmodel").status == 404, "an encoded slash is part of a segment"
        assert s.call("GET", "/%6doe/model").status == 200
        assert s.call("GET", "/health/live?x=1&y").status == 200
        check_error(s.call("GET", "/moe/%zz"), 400, "bad_request")
        assert s.raw(b"GET http://host/health/live HTTP/1.1\r\nHost: host\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_head():
    with Server() as s, s.client() as c:
        for path in ("/health/live", "/adapters", "/moe/model", "/metrics", "/v2"):
            get, head = c.call("GET", path), c.call("HEAD", path)
            assert head.status == 200 and head.body == b"" and int(head.headers["content-length"]) > 0, head
            if path != "/metrics":
                assert head.headers["content-length"] == get.headers["content-length"], (path, head)
        r = c.call("HEAD", "/nope")
        assert r.status == 404 and r.body == b"", r
        assert c.open


def test_keep_alive():
    with Server() as s, s.client() as c:
        first = c.http.sock
        for _ in range(20):
            assert c.call("GET", "/health/live").status == 200
            body, headers = forward_body(tokens(), binary=True)
            assert c.call("POST", "/moe/forward", body, headers).status == 200
            # Errors after the body was read, and those of requests without one, keep the connection.
            check_error(c.call("POST", "/moe/forward", b"{"), 400, "bad_json")
            check_error(c.call("GET", "/nope"), 404, "not_found")
            check_error(c.call("GET", "/adapters/none"), 404, "adapter_not_found", "none")
            assert c.http.sock is first
        # One that is refused before its body was read closes it, and the client can read why.
        r = c.call("POST", "/nope", b"x" * 100000)
        check_error(r, 404, "not_found")
        assert r.headers["connection"] == "close" and not c.open


def test_request_id():
    with Server() as s:
        assert s.call("GET", "/health/live", headers={"X-Request-Id": "a b~!"}).headers["x-request-id"] == "a b~!"
        assert s.call("GET", "/nope", headers={"X-Request-Id": "x" * 128}).headers["x-request-id"] == "x" * 128
        made = {s.call("GET", "/health/live", headers=h).headers["x-request-id"] for h in ({}, {}, {"X-Request-Id": "x" * 129}, {"X-Request-Id": "\xe4"}, {"X-Request-Id": ""})}
        assert len(made) == 5 and all(re.fullmatch("[0-9a-f]{32}", i) for i in made), made
        r = forward(s, tokens(), headers={"X-Request-Id": "one"})
        assert r.headers["x-request-id"] == "one"
        line = s.wait_log("one")
        assert "forward" in line and "200" in line, line


def test_json_log():
    with Server("--log-format", "json") as s:
        forward(s, tokens(rows=3), headers={"X-Request-Id": "logged"})
        entry = json.loads(s.wait_log("logged"))
        text = json.dumps(entry)
        assert entry.get("rows") == 3 and entry.get("layer") == 0 and entry.get("status") == 200 and entry.get("path") in ("decode", "prefill"), text


def test_encodings():
    with Server() as s:
        check_error(forward(s, tokens(), headers={"Content-Encoding": "gzip"}), 415, "unsupported_media_type", "gzip")
        assert forward(s, tokens(), headers={"Content-Encoding": "identity"}).status == 200
        for kind in ("text/html", "application/x-www-form-urlencoded", "nonsense"):
            assert forward(s, tokens(), headers={"Content-Type": kind}).status == 200


def test_reply_not_finite():
    with Server() as s:
        t = tokens(rows=3)
        t[0][3][64:] = [3e38] * 128  # overflows on the way for rows 1 and 2
        r = forward(s, t)
        check_error(r, 422, "non_finite_output", "row 1")
        r = forward(s, t, parameters={"binary_data_output": True})
        assert r.status == 200
        values = struct.unpack("<192f", r.body[-768:])
        assert all(v - v == 0 for v in values[:64]) and any(v - v != 0 for v in values[64:128]), values


run(globals())

# SPDX-License-Identifier: Apache-2.0
"""What the log tells whoever audits it afterwards: changes of adapters, failed requests, the end."""
from harness import *

FIXTURE = "qwen3_moe"


def fields(line):
    """key=value pairs of a text line."""
    return {k: re.sub(r"\\(.)", r"\1", v[1:-1]) if v[0] == '"' else v for k, v in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line)}


def test_adapters():
    name = sorted(d for d in os.listdir(fixture(FIXTURE)) if os.path.exists(os.path.join(fixture(FIXTURE), d, "adapter_config.json")))[0]
    body, headers = multipart(zip(("adapter_config", "adapter_model"), adapter_files(FIXTURE, name)))
    folder = os.path.join(fixture(FIXTURE), name)
    with Server("--adapter", f"first={folder}", fixture_name=FIXTURE) as s:
        first = s.call("GET", "/adapters/first").json()
        line = fields(s.wait_log("adapter installed.*first"))
        assert (line["id"], line["rank"], line["bytes"]) == tuple(str(first[k]) for k in ("id", "rank", "bytes")), line
        assert line["source"] == "--adapter" and line["path"] == folder, line

        def change(want, source, call, *arguments):
            seen = len(s.log)
            r = call(*arguments)
            assert r.status in (200, 201), r
            line = fields(s.wait_log(f"info {want}.* request_id={r.headers['x-request-id']}"))
            assert line.get("source") == source and line["rank"] == str(first["rank"]) and int(line["bytes"]) > 0 and line["id"], line
            request = fields(s.wait_log(f"info request request_id={r.headers['x-request-id']}"))
            assert request["adapter"] == line["adapter"], request
            return line

        a = change("adapter installed", "path", s.call, "POST", "/adapters", {"name": "a", "path": name})
        assert a["adapter"] == "a" and a["path"] == name, a
        b = change("adapter replaced", "path", s.call, "POST", "/adapters", {"name": "a", "path": name, "replace": True})
        assert b["id"] != a["id"]
        change("adapter replaced", "upload", s.call, "PUT", "/adapters/a", body, headers)
        change("adapter installed", "upload", s.call, "PUT", "/adapters/b%2Fc", body, headers)
        change("adapter installed", "path", s.call, "POST", "/v1/load_lora_adapter", {"lora_name": "v", "lora_path": name})
        assert change("adapter removed", None, s.call, "DELETE", "/adapters/b%2Fc")["adapter"] == "b/c"
        change("adapter removed", None, s.call, "POST", "/v1/unload_lora_adapter", {"lora_name": "v"})
        before = len([line for line in s.log if line and re.search("info adapter ", line)])
        r = s.call("POST", "/adapters", {"name": "a", "path": "nowhere"})
        line = fields(s.wait_log(f"info request request_id={r.headers['x-request-id']}"))
        assert line["adapter"] == "a" and line["status"] == "409", line
        assert len([line for line in s.log if line and re.search("info adapter ", line)]) == before, "a failed install is no change"


def test_errors():
    for form in ("text", "json"):
        with Server("--log-format", form) as s:
            for call in (("GET", "/adapters/no\"pe"), ("POST", "/moe/forward", b"{"), ("GET", "/nothing"), ("DELETE", "/adapters/gone")):
                r = s.call(*call)
                assert r.status >= 400
                line = s.wait_log(r.headers["x-request-id"])
                error = json.loads(line)["error"] if form == "json" else fields(line)["error"]
                assert error == r.json()["error"], (line, r)
                if "/adapters/" in call[1]:
                    assert (json.loads(line) if form == "json" else fields(line))["adapter"] == call[1][10:], line
            good = forward(s, tokens())
            assert "error" not in s.wait_log(good.headers["x-request-id"])


def test_targets():
    """Which path was asked for, where the route does not say it: shortened, without its query, and unable to forge a field."""
    for form in ("text", "json"):
        with Server("--log-format", form) as s:
            calls = (("GET", "/moe/forwrad?key=secret", 404, "/moe/forwrad"), ("GET", "/v2/models/nope", 404, "/v2/models/nope"),
                     ("DELETE", "/moe/forward", 405, "/moe/forward"), ("GET", "/" + "a" * 1000, 404, "/" + "a" * 127 + "..."),
                     ("GET", "/x%20status=200\"\\", 404, "/x%20status=200\"\\"), ("POST", "/%zz", 400, "/%zz"))
            for method, path, status, target in calls:
                r = s.call(method, path, *([b"{}"] if method == "POST" else []))
                assert r.status == status, r
                line = s.wait_log(r.headers["x-request-id"])
                got = json.loads(line) if form == "json" else fields(line)
                assert got["target"] == target and str(got["status"]) == str(status) and "secret" not in line, line
            # Still known when a body that is more than the connection's memory has followed.
            body, headers = forward_body(tokens(rows=4000), binary=True, parameters={"layer": 99})
            r = s.call("POST", "/moe/forward?key=secret", body, headers)
            check_error(r, 404, "layer_not_found")
            line = s.wait_log(r.headers["x-request-id"])
            assert (json.loads(line) if form == "json" else fields(line))["target"] == "/moe/forward" and "secret" not in line, line
            for r in (s.call("GET", "/adapters"), s.call("POST", "/moe/forward", b"{")):
                assert "target" not in s.wait_log(r.headers["x-request-id"])


def test_probes_are_quiet():
    with Server("--synthetic", "E=64,K=2,H=2048,I=2048,L=2", ready=False) as s:
        statuses = [s.call("GET", path).status for path in ("/health/ready", "/v2/health/ready", "/health/live") * 3]
        assert 503 in statuses, "the model was loaded before it could be asked for"
        s.signal()
        s.wait()
        assert not [line for line in s.log if line and "/health/" in line], s.log
    with Server("--log-level", "debug") as s:
        r = s.call("GET", "/health/ready")
        assert " debug " in s.wait_log(r.headers["x-request-id"])


def refused(server, status, code):
    """How many refusals were logged one by one, and how many in summaries."""
    lines = [line for line in server.log if line]
    return (sum(f"status={status} code={code}" in line for line in lines),
            [int(m.group(1)) for m in (re.search(rf" (\d+) more requests? w\w+ refused with {status} {code} in the last [\d.]+ s$", line) for line in lines) if m])


def test_refusals_are_limited():
    """The last of a burst are summed up without another request, or when the server ends; counters count all."""
    asked = 100
    for level in ("info", "debug"):
        with Server("--max-inflight-bytes", "4M", "--max-body-bytes", "3M", "--log-level", level) as s:
            post = lambda size: f"POST /moe/forward HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n".encode()

            def burst():
                for _ in range(asked):
                    check_error(parse_replies(s.raw(post(2000000)))[0], 429, "too_many_bytes_in_flight")

            def told():
                shown, left_out = refused(s, 429, "too_many_bytes_in_flight")
                return shown + sum(left_out)

            with s.connect() as c:  # holds most of the memory that bodies may have
                c.sendall(post(3000000) + b"x" * 2999999)
                eventually(lambda: gauge(s, "expertd_staging_bytes") >= 3000000)
                began = time.monotonic()
                burst()
                eventually(lambda: told() == asked)  # without another request
                seconds = time.monotonic() - began
                shown, left_out = refused(s, 429, "too_many_bytes_in_flight")
                if level == "debug":
                    assert (shown, left_out) == (asked, []), (shown, left_out)
                    continue
                assert 10 <= shown <= 10 * (int(seconds) + 2) and 1 <= len(left_out) <= seconds, (seconds, shown, left_out)
                count = re.search(r'^expertd_http_requests_total{route="/moe/forward",method="POST",status="429"} (\d+)$', s.call("GET", "/metrics").body.decode(), re.M)
                assert count and int(count.group(1)) == asked, count
                burst()
            s.signal()
            assert s.wait() == 0
            assert told() == 2 * asked, refused(s, 429, "too_many_bytes_in_flight")


def test_refusals_while_draining():
    with Server() as s, s.connect() as c:
        c.sendall(b"POST /moe/forward HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{")
        eventually(lambda: gauge(s, "expertd_staging_bytes") > 0)
        s.signal()
        s.wait_log("draining, at most")
        for _ in range(50):
            check_error(s.call("GET", "/moe/model"), 503, "draining")
        c.sendall(b"}")
        read_reply(c)
        assert s.wait() == 0
        shown, left_out = refused(s, 503, "draining")
        assert 10 <= shown < 50 and shown + sum(left_out) == 50, (shown, left_out)
        assert all(" warning " in line for line in s.log if line and "503 draining" in line)
        assert s.log[-2].endswith(" info stopped"), s.log[-4:]  # the last entry marks the end of the log


def test_end():
    with Server(*LASTING, "--max-batch-rows", "32", "--max-body-bytes", "64M") as s:
        with s.connect() as c:
            c.sendall(b"POST /moe/forward HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{")
            eventually(lambda: gauge(s, "expertd_staging_bytes") > 0)  # it has begun
            s.signal()
            s.wait_log("draining, at most")
            c.sendall(b"}")
            read_reply(c)
            assert s.wait() == 0
        lines = [re.sub(r"^\S+ ", "", line) for line in s.log if line]
        # Two when the look at the metrics was not quite over.
        assert re.fullmatch(r"info drained, [12] requests finished in \d+\.\d s", lines[-2]) and lines[-1] == "info stopped", lines[-4:]


run(globals())

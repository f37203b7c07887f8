# SPDX-License-Identifier: Apache-2.0
"""/adapters: list, show, install, replace, remove, uploads, and vLLM's calls."""
import stat

from harness import *

NAME = "qwen3_moe"
A, B = "adapter_2d_0", "adapter_peft3d_1"
FIELDS = ("adapter_config", "adapter_model")


def serve(*options, **more):
    return Server(*options, fixture_name=NAME, **more)


def model(server):
    m = server.call("GET", "/moe/model").json()
    return m["layers"][0], m["hidden_size"], m["experts"]


def infer(server, adapter=None, rows=4, **more):
    layer, hidden, experts = model(server)
    parameters = {"layer": layer, "binary_data_output": True, **({"adapter": adapter} if adapter else {}), **more}
    return forward(server, tokens(rows, hidden, 2, experts), True, parameters)


def output(reply, rows=4):
    assert reply.status == 200, reply
    n = int(reply.headers["inference-header-content-length"])
    return reply.body[n:]


def install(server, name, path, **more):
    return server.call("POST", "/adapters", {"name": name, "path": path, **more})


def upload(server, name, adapter=A, files=None, headers=None):
    body, more = multipart(list(zip(FIELDS, files or adapter_files(NAME, adapter))))
    return server.call("PUT", "/adapters/" + name, body, {**more, **(headers or {})})


def spooled(server):
    return [os.path.join(folder, f) for folder, _, files in os.walk(server.spool) for f in files]


def test_life_of_an_adapter():
    with serve() as s:
        assert s.call("GET", "/adapters").json() == {"adapters": []}
        base = output(infer(s))
        r = install(s, "one", A)
        assert r.status == 201, r
        one = r.json()
        assert one["name"] == "one" and one["state"] == "ready" and one["rank"] > 0 and one["experts"] > 0 and one["layers"], one
        assert one["in_flight"] == 0 and one["rows_served"] == 0 and one["bytes"] > 0 and one["warnings"] == [], one
        assert set(one["projections"]) <= {"gate", "up", "down"} and 0 <= one["id"] < 2**31, one
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", one["installed_at"]), one
        assert install(s, "two/b", B).status == 201
        assert [a["name"] for a in s.call("GET", "/adapters").json()["adapters"]] == ["one", "two/b"]
        assert s.call("GET", "/adapters/two%2Fb").json()["name"] == "two/b"
        assert s.call("GET", "/adapters/one").json() == one
        a, b = output(infer(s, "one")), output(infer(s, "two/b"))
        assert base not in (a, b) and a != b
        assert output(infer(s)) == base, "base rows do not feel adapters"
        assert s.call("GET", "/adapters/one").json()["rows_served"] == 4
        # By id, by name, repeated or said once: the same bits.
        layer, hidden, experts = model(s)
        for extra in (("adapter_id", "INT32", [4], [one["id"]] * 4), ("adapter_id", "INT64", [4], [one["id"]] * 4), ("adapter", "BYTES", [4], ["one"] * 4)):
            r = forward(s, tokens(4, hidden, 2, experts) + [extra], True, {"layer": layer, "binary_data_output": True})
            assert output(r) == a
        r = forward(s, tokens(4, hidden, 2, experts) + [("adapter", "BYTES", [4], ["one", "", "two/b", "one"])], True, {"layer": layer, "binary_data_output": True})
        row = len(a) // 4
        assert output(r) == a[:row] + base[row:2 * row] + b[2 * row:3 * row] + a[3 * row:]
        # Installed twice: only when asked to replace; a replaced one gets a new id, its old id is gone.
        check_error(install(s, "one", B), 409, "adapter_exists", 'called "one"', '"replace": true', "PUT /adapters/{name}")
        r = install(s, "one", B, replace=True)
        assert r.status == 200 and r.json()["id"] != one["id"], r
        assert output(infer(s, "one")) == b
        r = forward(s, tokens(4, hidden, 2, experts) + [("adapter_id", "INT32", [4], [one["id"]] * 4)], True, {"layer": layer})
        check_error(r, 404, "adapter_not_found", str(one["id"]))
        r = s.call("DELETE", "/adapters/one?wait=5")
        assert r.status == 200 and r.json()["state"] == "removed", r
        check_error(infer(s, "one"), 404, "adapter_not_found", "one")
        check_error(s.call("GET", "/adapters/one"), 404, "adapter_not_found")
        check_error(s.call("DELETE", "/adapters/one"), 404, "adapter_not_found")
        r = s.call("DELETE", "/adapters/two%2fb")
        assert r.status == 200 and r.json()["state"] in ("draining", "removed"), r
        assert output(infer(s)) == base


def test_misnamed_adapters():
    """What looks like an adapter's name but is none is refused: ignored, it would get the base's numbers."""
    with serve() as s:
        one = install(s, "one", A).json()
        layer, hidden, experts = model(s)
        name = s.call("GET", "/moe/model").json()["name"]
        keys = {"adapter_id": one["id"], "adaptor": "one", "adapters": ["one"] * 4, "lora": "one", "lora_name": "one", "LoRA_Request": {"lora_name": "one"}}
        for path in ("/moe/forward", f"/v2/models/{name}/infer", f"/v2/models/{name}/versions/1/infer"):
            for binary in (False, True):
                for key, value in keys.items():
                    r = forward(s, tokens(4, hidden, 2, experts), binary, {"layer": layer, key: value}, path)
                    check_error(r, 400, "bad_request", "parameters." + key, "parameters.adapter", "[T]")
                    r = forward(s, tokens(4, hidden, 2, experts), binary, {"layer": layer}, path, **{key: value})
                    check_error(r, 400, "bad_request", key, "parameters.adapter", "[T]")
                r = forward(s, tokens(4, hidden, 2, experts), binary, {"layer": layer}, path, adapter="one")
                check_error(r, 400, "bad_request", "member adapter ", "parameters.adapter")
                assert forward(s, tokens(4, hidden, 2, experts), binary, {"layer": layer, "adapter": "one", "priority": 1}, path, other=1).status == 200
        assert s.call("GET", "/adapters/one").json()["rows_served"] == 4 * 6


def test_bad_installs():
    with serve("--max-adapters", "2") as s:
        for field in ("foo", "Name", "lora_path"):
            check_error(install(s, "a", A, **{field: 1}), 400, "bad_request", field, "name, path and replace")
        assert s.call("GET", "/adapters").json() == {"adapters": []}
        for body in ({}, {"name": "a"}, {"path": A}, {"name": 1, "path": A}, {"name": "a", "path": A, "replace": 1}, [], {"name": "a", "path": ""}):
            r = s.call("POST", "/adapters", json_bytes(body))
            assert r.status == 400 and r.json()["code"] in ("bad_request", "bad_json"), (body, r)
        r = s.call("POST", "/adapters", b"")
        assert r.status == 400 and r.json()["code"] in ("bad_json", "bad_request"), r
        for name in (".a", "/a", "a b", "a" * 129, "\u00e4", "a/../b\u0000", ""):
            r = install(s, name, A)
            assert r.status == 400 and r.json()["code"] in ("bad_request", "bad_json"), (name, r)
        for path in ("../" + NAME + "/" + A, "/etc", "/", A + "/../../../..", fixture("olmoe")):
            check_error(install(s, "a", path), 403, "forbidden_path")
        check_error(install(s, "a", "missing"), 400, "bad_adapter", "missing")
        check_error(install(s, "a", "."), 400, "bad_adapter", "adapter_config.json")
        r = install(s, "a", "config.json")
        assert r.status in (400, 403), r
        assert install(s, "a", os.path.abspath(fixture(NAME)) + "/" + A).status == 201, "absolute, but beneath"
        assert install(s, "b", "./" + B).status == 201
        check_error(install(s, "c", A), 507, "adapter_slots_full", "2")
        assert [x["name"] for x in s.call("GET", "/adapters").json()["adapters"]] == ["a", "b"]
        for wait in ("x", "-1", "61", "1.5", "", "%zz", "99999999999"):
            check_error(s.call("DELETE", "/adapters/a?wait=" + wait), 400, "bad_request", "60")
        assert s.call("DELETE", "/adapters/a?wait=0").status == 200
    with Server() as s:
        check_error(install(s, "a", A), 403, "forbidden_path")


def json_bytes(body):
    return json.dumps(body).encode()


def test_upload():
    with serve() as s:
        r = upload(s, "up")
        assert r.status == 201, r
        install(s, "disk", A)
        assert output(infer(s, "up")) == output(infer(s, "disk"))
        r = upload(s, "up", B)
        assert r.status == 200, r
        assert output(infer(s, "up")) != output(infer(s, "disk"))
        r = upload(s, "n%2Fm")
        assert r.status == 201 and r.json()["name"] == "n/m", r
        assert spooled(s) == []
        # Chunked, in small pieces that cut the boundary everywhere.
        body, headers = multipart(list(zip(FIELDS, adapter_files(NAME, A))))
        head = b"PUT /adapters/up HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\nContent-Type: " + headers["Content-Type"].encode() + b"\r\n\r\n"
        for size in (13, 4099):
            pieces = b"".join(b"%x\r\n%s\r\n" % (len(body[i:i + size]), body[i:i + size]) for i in range(0, len(body), size))
            got = parse_replies(s.raw(head + pieces + b"0\r\n\r\n", 30))
            assert got[0].status == 200, got
            assert output(infer(s, "up")) == output(infer(s, "disk"))
        # A preamble, an epilogue, quoted boundary, other headers, reversed order.
        config, weights = adapter_files(NAME, A)
        b = "a'b c"
        body = (f"ignored\r\n--{b}\r\nX: y\r\ncontent-disposition:form-data;filename=\"x;y\" ; NAME=\"adapter_model\"\r\n\r\n".encode() + weights +
                f"\r\n--{b} \t\r\nContent-Disposition: form-data; name=adapter_config\r\n\r\n".encode() + config + f"\r\n--{b}--\r\nignored".encode())
        r = s.call("PUT", "/adapters/up", body, {"Content-Type": f"Multipart/Form-Data; charset=x; boundary=\"{b}\""})
        assert r.status == 200, r
        assert spooled(s) == []


def test_bad_uploads():
    with serve("--max-adapter-bytes", "300000") as s:
        config, weights = adapter_files(NAME, A)
        good = [(FIELDS[0], config), (FIELDS[1], weights)]

        def send(fields, status, code, *words, headers=None, body=None, name="x"):
            made, more = multipart(fields)
            check_error(s.call("PUT", "/adapters/" + name, made if body is None else body, more if headers is None else headers), status, code, *words)
            assert spooled(s) == []

        made, headers = multipart(good)
        send(good[:1], 400, "bad_request", "adapter_model")
        send(good[1:], 400, "bad_request", "adapter_config")
        send([], 400, "bad_request")
        send(good + good[:1], 400, "bad_request", "twice")
        send(good + [("extra", b"x")], 400, "bad_request", "extra")
        send([("../x", b"x")], 400, "bad_request")
        send(good, 400, "bad_request", "closing boundary", body=made[:-8])
        send(good, 400, "bad_request", "closing boundary", body=b"nothing")
        send(good, 400, "bad_request", body=b"")
        send(good, 400, "bad_request", body=made.replace(b"b0undary\r\n", b"b0undaryXX", 1))
        send(good, 400, "bad_request", body=made.replace(b"form-data", b"attachment", 1))
        send(good, 400, "bad_request", body=made.replace(b"Content-Disposition", b"Content-Nonsense", 1))
        send(good, 400, "bad_request", body=made.replace(b"Content-Type: app", b"X: " + b"y" * 5000 + b"\r\nContent-Type: app", 1))
        send(good, 400, "bad_request", body=made.replace(b"Content-Type: application/octet-stream", b"Content-Transfer-Encoding: base64", 1))
        for kind in ("multipart/form-data", "multipart/mixed; boundary=a", "application/json", "multipart/form-data; boundary=", "multipart/form-data; boundary=" + "a" * 71,
                     "multipart/form-data; boundary=\"a", "multipart/form-data; boundary=a; boundary=b", "multipart/form-dataX; boundary=a"):
            send(good, 415, "unsupported_media_type", headers={"Content-Type": kind})
        send(good, 415, "unsupported_media_type", headers={})
        for name in (".x", "a%20b", "a" * 129, "%2Fa"):
            send(good, 400, "bad_request", name=name)
        send([(FIELDS[0], config), (FIELDS[1], b"x" * 400000)], 413, "too_large", "300000")
        send([(FIELDS[0], b"{"), (FIELDS[1], weights)], 400, "bad_adapter")
        send([(FIELDS[0], config), (FIELDS[1], weights[:-1])], 400, "bad_adapter")
        send([(FIELDS[0], config), (FIELDS[1], b"")], 400, "bad_adapter")
        send([(FIELDS[0], config.replace(b"\"use_dora\": false", b"\"use_dora\": true")), (FIELDS[1], weights)], 400, "adapter_unsupported", "use_dora")
        assert s.call("GET", "/adapters").json() == {"adapters": []}
        assert upload(s, "x").status == 201
        before = output(infer(s, "x"))
        check_error(upload(s, "x", files=[config, weights[:-1]]), 400, "bad_adapter")
        assert output(infer(s, "x")) == before, "a failed replace leaves the old one"


def test_upload_ends_early():
    """The spool is emptied whoever goes: the client in mid-body, or a slow one that is cut off."""
    with serve("--request-timeout-s", "2") as s:
        body, headers = multipart(list(zip(FIELDS, adapter_files(NAME, A))))
        head = f"PUT /adapters/x HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\nContent-Type: {headers['Content-Type']}\r\n\r\n".encode()
        with s.connect() as c:
            c.sendall(head + body[:20000])
            files = eventually(lambda: spooled(s))
            assert all(stat.S_IMODE(os.stat(f).st_mode) == 0o600 for f in files), files
            assert stat.S_IMODE(os.stat(os.path.dirname(os.path.dirname(files[0]))).st_mode) == 0o700
        eventually(lambda: not spooled(s))
        with s.connect() as c:
            c.sendall(head + body[:20000])
            check_error(parse_replies(read_all(c))[0], 408, "timeout", "body")
        eventually(lambda: not spooled(s))
    with serve() as s:
        # Several at once; beyond the limit they are told to come back.
        held = []
        for _ in range(4):
            c = s.connect()
            c.sendall(head + body[:2000])
            held.append(c)
        eventually(lambda: len({os.path.dirname(f) for f in spooled(s)}) == 4)
        r = upload(s, "y")
        check_error(r, 429, "queue_full")
        for c in held:
            c.sendall(body[2000:])
        assert sorted(read_reply(c, 20)[0].status for c in held) == [200, 200, 200, 201]
        for c in held:
            c.close()


def test_leftovers():
    """What a killed server left is removed by the next; what a living one uses is not."""
    spool = tempfile.mkdtemp(prefix="expertd-spool-test-")
    try:
        body, headers = multipart(list(zip(FIELDS, adapter_files(NAME, A))))
        head = f"PUT /adapters/x HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\nContent-Type: {headers['Content-Type']}\r\n\r\n".encode()

        def begin(s):
            c = s.connect()
            count = len(spooled(s))
            c.sendall(head + body[:20000])
            eventually(lambda: len(spooled(s)) > count)
            return c

        os.mkdir(os.path.join(spool, "somebody-else"))
        os.symlink("/etc", os.path.join(spool, "expertd-spool-9-9"))
        with serve(spool=spool) as living:
            with begin(living) as c:
                used = spooled(living)
                assert used
                with serve(spool=spool) as dying:
                    broken = begin(dying)
                    dying.signal(signal.SIGKILL)
                    dying.wait()
                    broken.close()
                assert len(spooled(living)) > len(used)
                with serve(spool=spool):
                    assert spooled(living) == used
                c.sendall(body[20000:])
                assert read_reply(c)[0].status == 201
        assert sorted(os.listdir(spool)) == ["expertd-spool-9-9", "somebody-else"] and os.path.exists("/etc/passwd")
    finally:
        shutil.rmtree(spool, ignore_errors=True)


def test_replace_and_remove_in_use():
    """Every answer under churn is that of the old adapter or of the new one, never a mixture, and nothing is lost."""
    with serve() as s:
        install(s, "x", A)
        one = output(infer(s, "x", rows=32), 32)
        install(s, "x", B, replace=True)
        two = output(infer(s, "x", rows=32), 32)
        layer, hidden, experts = model(s)
        body, headers = forward_body(tokens(32, hidden, 2, experts), True, {"layer": layer, "binary_data_output": True, "adapter": "x"})
        stop, bad, seen = threading.Event(), [], set()

        def client():
            with s.client() as c:
                while not stop.is_set():
                    r = c.call("POST", "/moe/forward", body, headers)
                    out = r.body[int(r.headers.get("inference-header-content-length", 0)):] if r.status == 200 else None
                    if r.status == 404:
                        seen.add("gone")
                    elif out == one:
                        seen.add("one")
                    elif out == two:
                        seen.add("two")
                    else:
                        bad.append(r)
                        return

        threads = [threading.Thread(target=client) for _ in range(3)]
        for t in threads:
            t.start()
        try:
            for i in range(12):
                assert install(s, "x", (A, B)[i % 2], replace=True).status in (200, 201)
                if i % 4 == 3:
                    r = s.call("DELETE", "/adapters/x?wait=10")
                    assert r.status == 200 and r.json()["state"] == "removed", r
                time.sleep(0.02)
        finally:
            stop.set()
            for t in threads:
                t.join()
        assert not bad, bad[:1]
        assert {"one", "two"} <= seen, seen
        # The last was removed; those that had been replaced go when nobody uses them any more.
        eventually(lambda: s.call("GET", "/adapters").json()["adapters"] == [])
        eventually(lambda: s.call("GET", "/moe/model").json()["adapter_bytes"] == 0)


def test_start_with_adapters():
    with serve("--adapter", "a/b=" + os.path.join(fixture(NAME), A), "--adapter", "c=" + os.path.join(fixture(NAME), B)) as s:
        assert [x["name"] for x in s.call("GET", "/adapters").json()["adapters"]] == ["a/b", "c"]
        assert infer(s, "c").status == 200
    for wrong, late in (("x=/nowhere", False), ("x", False), ("=" + fixture(NAME), False), (".x=" + os.path.join(fixture(NAME), A), False),
                        ("x=" + fixture("olmoe"), True)):
        r = subprocess.run([EXPERTD, "--listen", "127.0.0.1:0", "--model", fixture(NAME), "--spool-dir", tempfile.gettempdir(), "--adapter", wrong],
                           capture_output=True, text=True, timeout=30 * SLOW)
        assert r.returncode == 2 and "--adapter" in r.stderr, (wrong, r)
        assert ("listening" in r.stderr) == late, r  # what can be seen at once is said before


def test_vllm():
    with serve("--model-name", "base") as s:
        def check(r, status, kind):
            e = r.json()["error"]
            assert r.status == status and e["code"] == status and e["type"] == kind and e["message"] and "param" in e, r

        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        r = s.call("POST", load, {"lora_name": "l/1", "lora_path": A})
        assert r.status == 200 and r.body == b"Success: LoRA adapter 'l/1' added successfully." and r.headers["content-type"].startswith("text/plain"), r
        check(s.call("POST", load, {"lora_name": "l/1", "lora_path": B}), 400, "InvalidUserInput")
        one = output(infer(s, "l/1"))
        r = s.call("POST", load, {"lora_name": "l/1", "lora_path": B, "load_inplace": True, "base_model_name": None})
        assert r.status == 200 and output(infer(s, "l/1")) != one, r
        j = s.call("GET", "/v1/models").json()
        assert j["object"] == "list" and [m["id"] for m in j["data"]] == ["base", "l/1"], j
        assert j["data"][0]["parent"] is None and j["data"][1]["parent"] == "base" and j["data"][1]["object"] == "model" and j["data"][1]["created"] > 1e9, j
        for body in ({}, {"lora_name": "x"}, {"lora_path": A}, {"lora_name": "", "lora_path": A}, {"lora_name": "x", "lora_path": ""}):
            r = s.call("POST", load, json_bytes(body))
            assert r.status == 400 and r.json()["error"]["code"] == 400, r
        check(s.call("POST", load, {"lora_name": "x", "lora_path": "missing"}), 404, "NotFoundError")
        check(s.call("POST", load, {"lora_name": "x", "lora_path": "."}), 404, "NotFoundError")  # a folder, but no adapter's
        r = s.call("POST", load, {"lora_name": "x", "lora_path": "/etc"})
        assert r.status == 403 and r.json()["error"]["message"], r
        r = s.call("POST", unload, {"lora_name": "l/1", "lora_int_id": 5})
        assert r.status == 200 and r.body == b"Success: LoRA adapter 'l/1' removed successfully.", r
        check(s.call("POST", unload, {"lora_name": "l/1"}), 404, "NotFoundError")
        assert s.call("POST", unload, json_bytes({})).status == 400
        assert [m["id"] for m in s.call("GET", "/v1/models").json()["data"]] == ["base"]
        check(s.call("POST", load, b"{"), 400, "BadRequestError")


run(globals())

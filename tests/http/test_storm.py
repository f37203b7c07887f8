# SPDX-License-Identifier: Apache-2.0
"""Many clients at once: every row has the bits of the row alone, whoever comes, goes or is replaced beside it; and ends in the middle of it all."""
import random

from harness import *

NAME = "qwen3_moe"
ADAPTERS = ["adapter_2d_0", "adapter_2d_1", "adapter_peft3d_0", "adapter_peft3d_1"]
SIZE = {"FP32": 4, "BF16": 2, "FP16": 2}
SECONDS = 4


def rows_of(rnd, rows, hidden, datatype):
    values = [rnd.gauss(0, 1) for _ in range(rows * hidden)]
    if datatype == "BF16":
        return b"".join(struct.pack("<f", v)[2:] for v in values)
    return struct.pack(f"<{len(values)}{'f' if datatype == 'FP32' else 'e'}", *values)


def request(datatype, hidden, rows, ids, weights, adapters, layer, mode):
    """(body, headers) of a binary request; `rows` is the hidden states' bytes."""
    count = len(rows) // (hidden * SIZE[datatype])
    k = len(ids) // count
    inputs, blob = [], b""
    for name, kind, shape, raw in (("hidden", datatype, [count, hidden], rows), ("expert_ids", "INT32", [count, k], struct.pack(f"<{len(ids)}i", *ids)),
                                   ("expert_weights", "FP32", [count, k], struct.pack(f"<{len(ids)}f", *weights)),
                                   ("adapter", "BYTES", [count], b"".join(struct.pack("<I", len(a)) + a.encode() for a in adapters))):
        inputs.append({"name": name, "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(raw)}})
        blob += raw
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, "layer": layer, "mode": mode}}).encode()
    return head + blob, {"Inference-Header-Content-Length": str(len(head))}


def split(reply):
    n = int(reply.headers["inference-header-content-length"])
    return json.loads(reply.body[:n]), reply.body[n:]


def golden(client, model, rnd, count):
    """Requests with the answers they get while nobody else is there; one row of each is held against that row alone."""
    cases = []
    for _ in range(count):
        rows, k, datatype = rnd.choice([1, 1, 2, 5, 8, 9, 40, 70]), rnd.choice([1, 2, model["experts"]]), rnd.choice(list(SIZE))
        layer, mode = rnd.choice(model["layers"]), rnd.choice(["auto", "decode", "prefill"])
        data = bytearray(rows_of(rnd, rows, model["hidden_size"], datatype))
        if datatype == "FP32" and rows > 1:  # of whom nobody else may hear
            data[:4] = struct.pack("<f", rnd.choice([float("nan"), float("inf"), 1e-42, -0.0]))
        ids = [rnd.randrange(-1, model["experts"]) for _ in range(rows * k)]
        weights = [rnd.random() for _ in ids]
        adapters = [rnd.choice(["", "a0", "a1", "a2", "a3"]) for _ in range(rows)]
        body, headers = request(datatype, model["hidden_size"], bytes(data), ids, weights, adapters, layer, mode)
        reply = client.call("POST", "/moe/forward", body, headers)
        assert reply.status == 200, reply
        head, out = split(reply)
        t, size = rows - 1, model["hidden_size"] * SIZE[datatype]
        alone, alone_headers = request(datatype, model["hidden_size"], bytes(data[t * size:]), ids[t * k:], weights[t * k:], adapters[t:], layer,
                                       head["parameters"]["path"])
        assert split(client.call("POST", "/moe/forward", alone, alone_headers))[1] == out[t * size:], (rows, k, datatype, mode, adapters[t])
        cases.append((body, headers, out))
    return cases


def head_of(body, headers):
    return (f"POST /moe/forward HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\nInference-Header-Content-Length: "
            f"{headers['Inference-Header-Content-Length']}\r\n\r\n").encode()


def test_bits_in_a_storm():
    rnd = random.Random(5)
    with Server("--log-level", "warning", "--threads", "2", "--batch-wait-us", "1000", "--max-batch-rows", "48", "--max-adapters", "12", fixture_name=NAME) as s:
        for i, path in enumerate(ADAPTERS):
            assert s.call("POST", "/adapters", {"name": f"a{i}", "path": path}).status == 201
        with s.client() as c:
            cases = golden(c, s.call("GET", "/moe/model").json(), rnd, 30)
        stop, bad, good = threading.Event(), [], [0]

        def ask(seed):
            mine = random.Random(seed)
            with s.client() as c:
                while not stop.is_set() and not bad:
                    body, headers, out = mine.choice(cases)
                    reply = c.call("POST", "/moe/forward", body, headers)
                    if reply.status == 200 and split(reply)[1] == out:
                        good[0] += 1
                    elif reply.status != 429:
                        bad.append((reply.status, reply.body[:200]))

        def vanish(seed):
            mine = random.Random(seed)
            while not stop.is_set() and not bad:
                body, headers, _ = mine.choice(cases)
                whole = head_of(body, headers) + body
                with s.connect() as c:
                    try:
                        c.sendall(whole[:mine.choice([len(whole), mine.randrange(len(whole))])])
                        if mine.random() < 0.3:
                            c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset
                    except OSError:
                        pass

        def churn(seed):
            mine = random.Random(seed)
            with s.client() as c:
                while not stop.is_set() and not bad:
                    name = f"churn{mine.randrange(3)}"
                    if mine.random() < 0.6:
                        r = c.call("POST", "/adapters", {"name": name, "path": mine.choice(ADAPTERS), "replace": mine.random() < 0.8})
                    else:
                        r = c.call("DELETE", f"/adapters/{name}?wait={mine.randrange(2)}")
                    if r.status not in (200, 201, 404, 409, 507):
                        bad.append(r)

        def guarded(function, seed):
            try:
                function(seed)
            except Exception as error:
                bad.append((function.__name__, repr(error)))

        threads = [threading.Thread(target=guarded, args=(f, i)) for i, f in enumerate([ask] * 6 + [vanish] * 2 + [churn] * 2)]
        for t in threads:
            t.start()
        time.sleep(SECONDS)
        end = time.monotonic() + 20 * SLOW
        while good[0] <= 50 and not bad and time.monotonic() < end:
            time.sleep(0.1)
        stop.set()
        for t in threads:
            t.join()
        assert not bad, bad[:3]
        assert good[0] > 50, good
        # Nobody's memory is held any more, and no reference. (Those who vanished may still fill the backlog and then all connections.)
        end = time.monotonic() + 10 * SLOW
        while True:
            metrics = s.call("GET", "/metrics")
            if metrics.status == 503 and time.monotonic() < end:
                time.sleep(0.1)
                continue
            held = re.search(r"^expertd_staging_bytes (\S+)$", metrics.body.decode(), re.M)
            assert metrics.status == 200 and held, metrics
            held = held.group(1)
            flight = [a["name"] for a in s.call("GET", "/adapters").json()["adapters"] if a["in_flight"] or a["state"] != "ready"]
            if float(held) == 0 and not flight:
                break
            assert time.monotonic() < end, (held, flight)
            time.sleep(0.1)


def test_end_in_a_storm():
    """A signal at any moment: an exit status of ours, whatever is under way, and whether or not draining may take its time."""
    rnd = random.Random(7)
    files = adapter_files(NAME, "adapter_2d_0")
    upload, upload_headers = multipart(list(zip(("adapter_config", "adapter_model"), files)))
    control = b'{"name":"x","path":"adapter_2d_0","replace":true}'
    for seconds, statuses in (("0", (0, 1)), ("30", (0,)), ("0", (0, 1)), ("30", (0,))):
        s = Server("--log-level", "warning", "--max-batch-rows", "8", "--batch-wait-us", "2000", "--drain-timeout-s", seconds, fixture_name=NAME)
        try:
            body, headers = forward_body(tokens(rows=16, hidden=128, experts=16), True, {"layer": 0, "binary_data_output": True})
            forward_whole = head_of(body, headers) + body
            calls = [forward_whole, forward_whole, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", b"DELETE /adapters/x?wait=60 HTTP/1.1\r\nHost: a\r\n\r\n",
                     b"POST /adapters HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(control) + control,
                     f"PUT /adapters/u HTTP/1.1\r\nHost: a\r\nContent-Type: {upload_headers['Content-Type']}\r\nContent-Length: {len(upload)}\r\n\r\n".encode() + upload]
            stop = threading.Event()

            def client(seed):
                mine = random.Random(seed)
                while not stop.is_set():
                    try:
                        with s.connect(timeout=5) as c:
                            for _ in range(10):
                                data = mine.choice(calls)
                                cut = mine.choice([len(data), mine.randrange(len(data))])
                                c.sendall(data[:cut])
                                c.sendall(data[cut:])
                                read_reply(c, 5)
                    except (OSError, AssertionError, ValueError):
                        if s.process.poll() is not None:
                            return

            threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
            for t in threads:
                t.start()
            time.sleep(0.2 + rnd.random() * 0.5)
            s.signal(rnd.choice([signal.SIGTERM, signal.SIGINT]))
            status = s.wait(60)
            stop.set()
            for t in threads:
                t.join()
            assert status in statuses, (status, [line for line in s.log if line and " request " not in line])
            if status == 0:
                assert os.listdir(s.spool) == []
        finally:
            s.stop()


run(globals())

# SPDX-License-Identifier: Apache-2.0
"""Slow senders and readers, clients that vanish, connection and memory limits."""
import fcntl
import termios

from harness import *

BODY, HEADERS = forward_body(tokens(rows=4), binary=True)
HEAD = (f"POST /moe/forward HTTP/1.1\r\nHost: a\r\nInference-Header-Content-Length: {HEADERS['Inference-Header-Content-Length']}\r\n").encode()


def trickle(server, start, drop, limit=20 * SLOW):
    """Sends `start`, then bytes of `drop` half a second apart, for `limit` seconds at most; returns what came back and how long it took."""
    with server.connect() as c:
        c.sendall(start)
        began, got = time.monotonic(), b""
        for i in range(int(limit * 2)):
            try:
                c.send(drop[i % len(drop):i % len(drop) + 1])
            except OSError:
                break
            ready, _, _ = select.select([c], [], [], 0.5)
            if ready:
                got += read_all(c)
                break
        return got, time.monotonic() - began


@aside
def test_trickled_head():
    with Server("--request-timeout-s", "2") as s:
        got, took = trickle(s, b"GET /health/live HTTP/1.1\r\nHost: a\r\nX: ", b"y")
        check_error(parse_replies(got)[0], 408, "timeout", "head", "within 2 s")
        assert took > 1.5, took


@aside
def test_trickled_request_line():
    with Server("--request-timeout-s", "2") as s:
        got, took = trickle(s, b"GE", b"T")
        check_error(parse_replies(got)[0], 408, "timeout")
        assert took > 1.5, took


@aside
def test_trickled_end_of_line():
    with Server("--request-timeout-s", "2") as s:
        got, took = trickle(s, b"", b"\r")
        check_error(parse_replies(got)[0], 408, "timeout")
        assert took > 1.5, took


@aside
def test_silence():
    with Server("--request-timeout-s", "2") as s:
        check_error(parse_replies(s.raw(b""))[0], 408, "timeout")


@aside
def test_trickled_head_on_a_kept_alive_connection():
    with Server("--request-timeout-s", "2") as s, s.connect() as c:
        c.sendall(b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_reply(c)[0].status == 200
        time.sleep(2.5)  # idle is not slow
        c.sendall(b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_reply(c)[0].status == 200
        c.sendall(b"GET /health/live HTTP/1.1\r\nHos")
        check_error(parse_replies(read_all(c))[0], 408, "timeout")


@aside
def test_trickled_body():
    with Server("--request-timeout-s", "2") as s:
        got, took = trickle(s, HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:10], BODY[10:])
        check_error(parse_replies(got)[0], 408, "timeout", "body", "within 2 s")
        assert took > 1.5, took
        line = s.wait_log(parse_replies(got)[0].headers["x-request-id"])  # what the client was told leads to the log
        assert "status=408" in line and "body did not arrive within 2 s" in line, line


@aside
def test_trickled_chunks():
    with Server("--request-timeout-s", "2") as s:
        got, took = trickle(s, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n")
        check_error(parse_replies(got)[0], 408, "timeout", "body")
        assert took > 1.5, took
        s.wait_log("status=408")


@aside
def test_long_body_that_stalls():
    """It is given two seconds and one more for each MiB that came, not for each of the 64 that were to come."""
    with Server("--request-timeout-s", "2") as s, s.connect() as c:
        c.settimeout(60)
        began = time.monotonic()
        c.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (64 << 20) + b"x" * (1 << 20))
        check_error(parse_replies(read_all(c))[0], 408, "timeout", "body")
        took = time.monotonic() - began
        assert 2.5 < took < 30, took


@aside
def test_patient_client():
    """One that pauses, but is done in time, is served."""
    with Server("--request-timeout-s", "10") as s:
        with s.connect() as c:
            c.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:100])
            time.sleep(2)
            c.sendall(BODY[100:])
            assert read_reply(c)[0].status == 200


def staging(server):
    """Bytes of staging memory in use."""
    return gauge(server, "expertd_staging_bytes")


def test_vanishing_with_a_head_that_is_too_much_for_the_library():
    """Its memory runs out over the query's many parameters, and it never tells what became of such a request: ours must come back all the same."""
    resident = lambda s: int(re.search(r"VmRSS:\s+(\d+)", open(f"/proc/{s.process.pid}/status").read()).group(1))
    with Server() as s:
        start = resident(s)
        for _ in range(600):
            with s.connect() as c:
                c.sendall(b"GET /health/live?" + b"a&" * 4000 + b"x" * 50000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")
                time.sleep(0.001)
        eventually(lambda: gauge(s, "expertd_http_connections") == 1)
        # A sanitizer keeps what is freed, and tells leaks at the end.
        assert SLOW > 1 or resident(s) - start < 16384, (start, resident(s))


def test_vanishing_in_the_body():
    with Server() as s:
        before = staging(s)
        for cut in (0, 1, 100, len(BODY) - 1):
            with s.connect() as c:
                c.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[:cut])
        for _ in range(3):
            with s.connect() as c:
                c.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n100\r\n" + BODY[:100])
        eventually(lambda: staging(s) == before)
        assert s.call("GET", "/health/live").status == 200


def busy(server, rows=512, count=1, k=8):
    """Starts requests that take a while; returns their sockets."""
    data, made = heavy(rows, 1024, k), []
    for _ in range(count):
        made.append(server.connect())
        made[-1].sendall(data)
    return made


def test_vanishing_in_the_queue():
    with Server(*LASTING, "--max-batch-rows", "1024") as s:
        first = busy(s, rows=1024, count=3)
        eventually(lambda: gauge(s, "expertd_running_rows") > 0)
        # These wait behind; they go away without having been computed.
        gone = busy(s, rows=64, count=6)
        eventually(lambda: gauge(s, "expertd_queue_requests") > 2)
        for c in gone:
            c.close()
        for c in first:
            assert read_reply(c, 60)[0].status == 200
            c.close()
        stats = lambda: s.call("GET", "/metrics").body.decode()
        s.wait_log("status=499")
        assert re.search(r'nv_inference_request_failure\{[^}]*reason="CANCELED"[^}]*\} [1-6]', stats()), stats()
        assert forward(s, tokens(hidden=1024)).status == 200


def test_half_closed():
    """Who closes the sending side before the answer has begun is taken to have gone; the server goes on."""
    with Server() as s:
        got = s.raw(b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n", shut=True)
        assert got.startswith(b"HTTP/1.1 200"), got
        got = s.raw(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY, shut=True)
        assert got == b"" or got.startswith(b"HTTP/1.1 200"), got
        assert forward(s, tokens()).status == 200


def test_vanishing_in_the_reply():
    with Server(*LASTING, "--max-body-bytes", "64M") as s:
        before = staging(s)
        for c in busy(s, rows=1300, count=2, k=2):  # a reply is more than sockets hold
            assert c.recv(100)
            c.close()
        eventually(lambda: staging(s) == before)
        assert forward(s, tokens(hidden=1024)).status == 200


@aside
def test_removals_that_wait_hold_up_no_install():
    name = "mixtral"
    adapter = sorted(d for d in os.listdir(fixture(name)) if d.startswith("adapter_"))[0]
    with Server("--max-batch-rows", "64", "--queue-rows", "1000000", fixture_name=name) as s:
        count, rows = 6, 4000 if SLOW > 1 else 65000
        for i in range(count):
            assert s.call("POST", "/adapters", {"name": f"a{i}", "path": adapter}).status == 201
        tensors = [t for t, _ in (tensor(*t, binary=True) for t in tokens(1, 64, 8))]
        raws = [raw * rows for _, raw in (tensor(*t, binary=True) for t in tokens(1, 64, 8))]
        tensors.append({"name": "adapter", "datatype": "BYTES", "shape": [rows]})
        raws.append(b"".join(struct.pack("<I", 2) + b"a%d" % (i % count) for i in range(rows)))
        for t, raw in zip(tensors, raws):
            t.update(shape=[rows] + t["shape"][1:], parameters={"binary_data_size": len(raw)})
        head = json.dumps({"inputs": tensors, "parameters": {"layer": 0, "binary_data_output": True}}).encode()
        ends = {}

        def call(key, *arguments):
            r = s.call(*arguments)
            ends[key] = time.monotonic()
            assert r.status == 200, r

        request = ("POST", "/moe/forward", head + b"".join(raws), {"Inference-Header-Content-Length": str(len(head))})
        threads = [threading.Thread(target=call, args=(f"forward {i}", *request)) for i in range(4)]
        for t in threads:
            t.start()
        eventually(lambda: gauge(s, "expertd_queue_rows") + gauge(s, "expertd_running_rows") > 3 * rows)
        for i in range(count):
            threads.append(threading.Thread(target=call, args=(i, "DELETE", f"/adapters/a{i}?wait=60")))
            threads[-1].start()
        eventually(lambda: not any(a["state"] == "ready" for a in s.call("GET", "/adapters").json()["adapters"]))
        assert s.call("POST", "/adapters", {"name": "new", "path": adapter}).status == 201
        installed = time.monotonic()
        for t in threads:
            t.join()
        assert len(ends) == count + 4 and installed < min(ends[i] for i in range(count)), (installed, ends)


def test_reader_that_stalls():
    """Its reply's memory comes back once the time for the reply is up: two seconds, and one more for each MiB."""
    with Server(*LASTING, "--request-timeout-s", "2", "--max-body-bytes", "64M") as s:
        before = staging(s)
        data = heavy(1300, 1024, 2)  # more than sockets hold
        c = socket.socket()
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        c.connect(("127.0.0.1", s.port))
        c.sendall(data)
        c.settimeout(30 * SLOW)
        assert c.recv(1)
        assert staging(s) > before
        eventually(lambda: staging(s) == before, 40)
        c.close()


def test_connection_limit():
    with Server("--max-connections", "4") as s:
        def fill():
            """Four that are served, once the probes' connections are gone."""
            made = [s.client() for _ in range(4)]
            try:
                if all(c.call("GET", "/health/live").status == 200 for c in made):
                    return made
            except OSError:
                pass  # told so and closed before we had asked
            for c in made:
                c.close()
            return None

        held = eventually(fill)
        for _ in range(3):
            replies = parse_replies(s.raw(b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n"))
            assert len(replies) == 1
            check_error(replies[0], 503, "too_many_connections", "4")
        for c in held:
            assert c.call("GET", "/health/live").status == 200, "the others are untouched"
        held[0].close()
        def again():
            got = s.raw(b"GET /health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return got.startswith(b"HTTP/1.1 200")
        eventually(again)
        for c in held:
            c.close()
        eventually(again)


def test_queue_full():
    with Server(*LASTING, "--queue-rows", "600", "--max-batch-rows", "64") as s:
        first = busy(s, rows=512, count=1)
        eventually(lambda: gauge(s, "expertd_running_rows") > 0)
        seen = set()
        more = busy(s, rows=512, count=4)
        for c in first + more:
            r = read_reply(c, 60)[0]
            seen.add(r.status)
            if r.status == 429:
                check_error(r, 429, "queue_full")
                assert int(r.headers["retry-after"]) >= 1 and "connection" not in r.headers, r
            c.close()
        assert seen == {200, 429}, seen
        eventually(lambda: forward(s, tokens(hidden=1024)).status == 200)


def test_bytes_in_flight():
    with Server("--max-inflight-bytes", "4M", "--max-body-bytes", "3M") as s:
        with s.connect() as a:
            a.sendall(HEAD + b"Content-Length: 3000000\r\n\r\n" + b"x" * 200000)
            eventually(lambda: staging(s) >= 3000000)  # the whole, when a sixteenth has come
            r = s.call("POST", "/moe/forward", b"x" * 2000000)
            check_error(r, 429, "too_many_bytes_in_flight", "2000000", "4194304")
            assert r.headers["retry-after"] and r.headers["connection"] == "close", r
            assert forward(s, tokens()).status == 200, "small ones still fit"
        eventually(lambda: s.call("POST", "/moe/forward", b"x" * 2000000).status == 400)


def test_more_bytes_than_all_may_have():
    """Who needs more than --max-inflight-bytes even alone is told so, and not to try again: with its body, with its body while that grows, with
    the tensors from its JSON, with its reply."""
    with Server("--max-inflight-bytes", "1M", "--max-body-bytes", "4M") as s:
        def padded(rows, length, binary):
            body, headers = forward_body(tokens(rows), binary)
            head = int(headers.get("Inference-Header-Content-Length", len(body)))
            blank = max(0, length - len(body))
            return body[:head] + b" " * blank + body[head:], {"Inference-Header-Content-Length": str(head + blank)} if binary else {}

        def chunks(body):
            for i in range(0, len(body), 20000):
                yield body[i:i + 20000]

        whole, headers = padded(4, 1000000, binary=True)
        check_error(s.call("POST", "/moe/forward", whole + b" " * 100000, headers), 413, "too_large", str(len(whole) + 100000), "1048576")
        with s.connect() as c:  # in two pieces, of which the first is too short for the whole to be taken
            c.sendall(HEAD + b"Content-Length: 1040000\r\n\r\n" + b"x" * 10000)
            eventually(lambda: staging(s) == 65000)
            c.sendall(b"x" * 100000)
            check_error(read_reply(c)[0], 413, "too_large", "1105000", "1048576")
        eventually(lambda: staging(s) == 0)
        chunked = s.call("POST", "/moe/forward", chunks(whole), headers)  # a body without a length is sent in chunks
        check_error(chunked, 413, "too_large", "1048576")
        body, headers = padded(2200, 0, binary=True)
        assert 563200 < len(body) < 650000, len(body)  # of which hidden has 563,200, as has the reply
        check_error(s.call("POST", "/moe/forward", body, headers), 413, "too_large", "1048576")
        body, headers = padded(1000, 900000, binary=False)
        assert len(body) == 900000, len(body)  # and hidden has 256,000
        check_error(s.call("POST", "/moe/forward", body, headers), 413, "too_large", "1156000", "1048576")
        eventually(lambda: staging(s) == 0)
        assert forward(s, tokens()).status == 200


def test_heads_alone_hold_no_memory():
    """Twenty that announce 64 MB each, where all may have 256 in flight, and then send next to nothing: others are served as ever."""
    count, announced = 20, 64 << 20
    with Server("--max-inflight-bytes", "256M", "--max-body-bytes", "64M") as s:
        silent = [s.connect() for _ in range(count)]
        for c in silent:
            c.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % announced)
        for c in silent:
            assert c.recv(100).startswith(b"HTTP/1.1 100 "), "the head is accepted"
        sent = 0
        for more in (0, 1, 60000):
            for c in silent:
                c.sendall(b"x" * more)
            sent += more
            # The long body of the round before is given back a moment after its answer.
            eventually(lambda: count * sent <= staging(s) <= 16 * count * sent)
            check_error(s.call("POST", "/moe/forward", b"x" * announced), 400, "bad_json")
            assert forward(s, tokens()).status == 200
        for c in silent:
            c.close()
        eventually(lambda: staging(s) == 0)


def test_bytes_in_flight_are_bounded_while_they_arrive():
    """Bodies that pass the bound together are begun, since none of their heads does, but not held: some are told so midway, and can read it."""
    body, length, limit = b"x" * 3000000, 3000000, 4 << 20
    with Server("--max-inflight-bytes", "4M", "--max-body-bytes", "3M") as s:
        made = [s.connect() for _ in range(4)]
        for c in made:
            c.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % length + body[:100000])
        eventually(lambda: staging(s) >= 400000)
        for c in made:
            c.sendall(body[100000:300000])
            time.sleep(0.1)
            assert staging(s) <= limit
        for c in made[1:]:
            r = read_reply(c)[0]
            check_error(r, 429, "too_many_bytes_in_flight")
            assert r.headers["retry-after"] and r.headers["connection"] == "close", r
            c.close()
        eventually(lambda: staging(s) == length)
        made[0].sendall(body[300000:])
        assert read_reply(made[0])[0].status == 400  # it was taken whole, and is no JSON
        made[0].close()
        eventually(lambda: staging(s) == 0)


def test_long_answer_on_a_unix_socket():
    """The server is rid of more of it than such a socket holds by default (208 KiB) before the client reads any."""
    with tempfile.TemporaryDirectory() as folder, Server(listen=(f"unix:{folder}/s",)) as s, s.connect() as c:
        c.sendall(heavy(4000, 64, 2))

        def there():
            number = bytearray(4)
            fcntl.ioctl(c, termios.FIONREAD, number)
            return int.from_bytes(number, sys.byteorder)
        eventually(lambda: there() > 300 << 10)
        reply = read_reply(c)[0]
        assert reply.status == 200 and len(reply.body) > 4000 * 64 * 4, reply.status


def test_deadline():
    with Server(*LASTING, "--request-timeout-s", "1", "--max-batch-rows", "32", "--max-body-bytes", "64M") as s:
        made = busy(s, rows=250, count=8)
        statuses = []
        for c in made:
            r = read_reply(c, 60)[0]
            statuses.append(r.status)
            if r.status == 504:
                check_error(r, 504, "deadline_exceeded", "1 s")
            c.close()
        assert set(statuses) <= {200, 504} and 200 in statuses, statuses


run(globals())

# SPDX-License-Identifier: Apache-2.0
"""Heads on which two parsers could disagree, and bodies that come in unusual ways, by raw sockets."""
from harness import *

BODY, HEADERS = forward_body(tokens(), binary=True)
INFER = f"Inference-Header-Content-Length: {HEADERS['Inference-Header-Content-Length']}\r\n".encode()


def post(extra=b"", host=b"Host: a\r\n", path=b"/moe/forward", version=b"HTTP/1.1", body=BODY):
    return b"POST " + path + b" " + version + b"\r\n" + host + INFER + extra + b"\r\n" + body


def refused(server, data, *words):
    """Exactly one answer, 400 bad_framing, and then the end."""
    replies = parse_replies(server.raw(data))
    assert len(replies) == 1, (data[:200], replies)
    check_error(replies[0], 400, "bad_framing", *words)
    assert replies[0].headers["connection"] == "close", replies


def refused_somehow(server, data):
    """The library's own page, ours, or none, and then the end: but never a second request, and never an answer of 200."""
    got = server.raw(data)
    assert got == b"" or got.startswith(b"HTTP/1.1 4") or got.startswith(b"HTTP/1.0 4") or got.startswith(b"HTTP/1.1 505"), (data[:200], got[:300])
    assert not re.search(rb"HTTP/1.[01] [123]", got), got


def test_smuggling():
    length = b"Content-Length: %d\r\n" % len(BODY)
    with Server() as s:
        assert s.raw(post(length + b"Connection: close\r\n")).startswith(b"HTTP/1.1 200")
        refused(s, post(length + b"Content-Length: 5\r\n"), "2 Content-Length")
        refused(s, post(length + length), "2 Content-Length")
        refused(s, post(length + b"content-LENGTH: 0\r\n"), "2 Content-Length")
        refused(s, post(length + b"Transfer-Encoding: chunked\r\n"), "both")
        refused(s, post(b"Transfer-Encoding: chunked\r\n" + length), "both")
        refused(s, post(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), "2 Transfer-Encoding")
        refused(s, post(b"Content-Length : 5\r\n"), "colon")
        refused(s, post(b"Transfer-Encoding : chunked\r\n" + length), "colon")
        refused(s, post(b"Transfer-Encoding\t: chunked\r\n" + length), "colon")
        for coding in (b"gzip", b"gzip, chunked", b"chunked, identity", b"identity", b"xchunked", b"chunked;q=1", b"\"chunked\"", b"\x0bchunked"):
            refused_somehow(s, post(b"Transfer-Encoding: " + coding + b"\r\n"))
        refused(s, post(b"Transfer-Encoding: chunked\r\n", version=b"HTTP/1.0"), "HTTP/1.0")
        for value in (b"+5", b"-5", b"0x5", b"5, 5", b"5 5", b"", b"99999999999999999999999", b"1e3", b"\xd9\xa5"):
            refused_somehow(s, post(b"Content-Length: " + value + b"\r\n"))
        refused(s, post(length + b"X: a\r\n  b\r\n"))
        refused(s, post(length + b"X: a\r\n\tContent-Length: 5\r\nY: b\r\n"))
        refused_somehow(s, b"GET /health/live HTTP/1.1\r\n X: y\r\nHost: a\r\n\r\n")
        refused(s, post(length + b"X: a\nY: b\r\n"))
        refused(s, post(length + b"X: a\x00b\r\n"))
        refused(s, post(length + b"X: a\x01b\r\n"), "control")
        refused(s, post(length + b"X: a\rb\r\n"))
        refused(s, post(length + b"X Y: a\r\n"))
        refused(s, post(length + b"X(Y): a\r\n"))
        refused_somehow(s, post(length + b"novalue\r\n"))
        for name in (b": empty\r\n", b":\r\n", b" : x\r\n"):
            refused_somehow(s, post(length + name))
            refused(s, b"GET /health/live HTTP/1.0\r\n" + name + b"Host: a\r\n\r\n")
        assert s.call("GET", "/health/live").status == 200


def test_heads_in_pieces():
    """Where the library keeps the pieces of a head is looked at: that must not depend on how they arrive, or on what came before."""
    with Server() as s, s.connect() as c:
        for extra in (0, 1, 50, 180):
            head = post(b"Content-Length: %d\r\n" % len(BODY) + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 50) for i in range(extra)), body=b"")
            for size in (1, 7, 1000, 10**6):
                if size > 1 or extra < 50:
                    for i in range(0, len(head), size):
                        c.sendall(head[i:i + size])
                        if i % 50 == 0:
                            time.sleep(0.001)
                    c.sendall(BODY)
                    reply, rest = read_reply(c)
                    assert reply.status == 200 and not rest, (extra, size, reply)


def test_hosts():
    with Server() as s:
        get = lambda host, version=b"HTTP/1.1": b"GET /health/live " + version + b"\r\n" + host + b"Connection: close\r\n\r\n"
        refused(s, get(b""), "Host")
        refused(s, get(b"Host: a\r\nHost: b\r\n"), "Host")
        refused(s, get(b"Host: a\r\nhost: a\r\n"), "Host")
        for host in (b"a/b", b"a b", b"a@b", b"a,b"):
            refused(s, get(b"Host: " + host + b"\r\n"), "Host")
        for host in (b"a", b"a:80", b"[::1]:80", b""):
            assert s.raw(get(b"Host: " + host + b"\r\n")).startswith(b"HTTP/1.1 200"), host
        assert b" 200 " in s.raw(get(b"", b"HTTP/1.0"))[:20]
        refused_somehow(s, get(b"Host: a\r\n", b"HTTP/2.0"))
        refused_somehow(s, get(b"Host: a\r\n", b"HTTP/1.2"))
        refused_somehow(s, get(b"Host: a\r\n", b"HTTPS/1.1"))


def test_targets():
    with Server() as s:
        get = lambda path: b"GET " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        refused(s, get(b"/health/live%00"), "NUL")
        refused(s, get(b"/adapters/a%00b"), "NUL")
        refused(s, get(b"/health/live?x=%00"), "NUL")
        refused_somehow(s, get(b"/health/live\x00/x"))
        refused_somehow(s, get(b"/health/li\x01ve"))
        refused_somehow(s, get(b"/health/live\x00"))
        refused(s, b"GET\x00 /health/live HTTP/1.1\r\nHost: a\r\n\r\n", "method")
        refused(s, b"GET\x00POST /health/live HTTP/1.1\r\nHost: a\r\n\r\n", "method")
        assert s.raw(get(b"/health%2flive")).startswith(b"HTTP/1.1 404")
        assert s.raw(get(b"/health/../health/live")).startswith(b"HTTP/1.1 404")
        assert s.raw(get(b"/adapters/%01")).startswith(b"HTTP/1.1 400")
        assert s.raw(get(b"*")).startswith(b"HTTP/1.1 400")
        long = s.raw(get(b"/" + b"a" * 200000))
        assert long.startswith(b"HTTP/1.1 4") or long.startswith(b"HTTP/1.0 4") or long == b"", long[:100]
        many = s.raw(b"GET /health/live HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: %s\r\n" % (i, b"y" * 100) for i in range(3000)) + b"\r\n")
        assert many == b"" or many[9:10] == b"4", many[:100]
        assert s.call("GET", "/health/live").status == 200


def test_duplicates_of_ours():
    with Server() as s:
        refused(s, post(b"Content-Length: %d\r\n" % len(BODY) + INFER), "Inference-Header")
        refused(s, b"GET /moe/model HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", "Authorization")


def chunked(data, size, extension=b""):
    return b"".join(b"%x%s\r\n%s\r\n" % (len(data[i:i + size]), extension, data[i:i + size]) for i in range(0, len(data), size)) + b"0\r\n\r\n"


def test_chunked():
    with Server("--max-body-bytes", "200000") as s:
        want = s.raw(post(b"Content-Length: %d\r\nConnection: close\r\n" % len(BODY))).split(b"\r\n\r\n", 1)[1]
        out = lambda reply: re.search(rb'"outputs".*', reply, re.S).group(0)
        head = post(b"Transfer-Encoding: chunked\r\nConnection: close\r\n", body=b"")
        for size, extension in ((1, b""), (7, b""), (100, b";a=b"), (10**6, b"")):
            got = s.raw(head + chunked(BODY, size, extension))
            assert got.startswith(b"HTTP/1.1 200") and out(got) == out(want), got[:300]
        # Grows over several sizes, and one keep-alive connection takes several.
        big, headers = forward_body(tokens(rows=600), binary=True)
        infer = f"Inference-Header-Content-Length: {headers['Inference-Header-Content-Length']}\r\n".encode()
        one = b"POST /moe/forward HTTP/1.1\r\nHost: a\r\n" + infer + b"TRANSFER-encoding: Chunked\r\n\r\n" + chunked(big, 5000)
        with s.connect() as c:
            for _ in range(3):
                c.sendall(one)
                reply, rest = read_reply(c)
                assert reply.status == 200 and not rest, reply
        # Too long: an answer in the middle, then the end.
        with s.connect() as c:
            c.sendall(head)
            try:
                for _ in range(60):
                    c.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            except OSError:
                pass
            got = parse_replies(read_all(c))
            assert len(got) == 1, got
            check_error(got[0], 413, "too_large", "200000")
        for broken in (b"zz\r\n", b"5\r\nabcdefgh\r\n", b"-1\r\n", b"\r\n", b"ffffffffffffffffffff\r\n"):
            refused_somehow(s, head + broken)
        assert s.call("GET", "/health/live").status == 200


def test_expect_continue():
    with Server("--max-body-bytes", "100000") as s:
        with s.connect() as c:
            c.sendall(post(b"Content-Length: %d\r\nExpect: 100-continue\r\n" % len(BODY), body=b""))
            c.settimeout(5 * SLOW)
            assert c.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
            c.sendall(BODY)
            assert read_reply(c)[0].status == 200
        for data, status, code in ((post(b"Content-Length: 100001\r\nExpect: 100-continue\r\n", body=b""), 413, "too_large"),
                                   (post(b"Content-Length: 10\r\nExpect: 100-continue\r\n", path=b"/nope", body=b""), 404, "not_found"),
                                   (post(b"Content-Length: 10\r\nContent-Length: 10\r\nExpect: 100-continue\r\n", body=b""), 400, "bad_framing")):
            replies = parse_replies(s.raw(data))
            assert len(replies) == 1, replies
            check_error(replies[0], status, code)


def test_pipelining():
    with Server() as s, s.connect() as c:
        one = post(b"Content-Length: %d\r\n" % len(BODY))
        health = b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n"
        c.sendall(one + health + one + b"GET /nope HTTP/1.1\r\nHost: a\r\n\r\n" + one.replace(b"Host: a\r\n", b"Host: a\r\nConnection: close\r\n"))
        replies = parse_replies(read_all(c))
        assert [r.status for r in replies] == [200, 200, 200, 404, 200], replies


def test_large_body_refused_from_the_head():
    """The client may send all of it and still reads the answer."""
    with Server("--max-body-bytes", "1000000") as s:
        for size in (1000001, 30 << 20):
            r = s.call("POST", "/moe/forward", b"x" * size)
            check_error(r, 413, "too_large", str(size), "1000000")
        assert s.raw(post(b"Content-Length: 999999999999\r\n", body=b"")).startswith(b"HTTP/1.1 413")
        r = s.call("POST", "/adapters", b"x" * (1 << 20 | 1))
        check_error(r, 413, "too_large")
        assert s.call("POST", "/moe/forward", b"x" * 1000000).status == 400


def test_bodies_where_none_is_needed():
    with Server() as s, s.client() as c:
        assert c.call("GET", "/health/live", b"ignored").status == 200
        assert c.call("DELETE", "/adapters/x", b"{}").status == 404
        assert c.open
        r = s.call("GET", "/health/live", b"x" * (2 << 20))
        check_error(r, 413, "too_large")


run(globals())

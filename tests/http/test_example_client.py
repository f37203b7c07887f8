# SPDX-License-Identifier: Apache-2.0
"""deploy/example_client.py, which users copy: what it sends for each type of array, and what it refuses. Needs numpy; skipped without it."""
from harness import *

try:
    import numpy as np
except ImportError:
    print("numpy is not installed: the example client is not tested")
    sys.exit(SKIP)

sys.path.insert(0, os.path.join(HERE, "..", "..", "deploy"))
import example_client as example  # noqa: E402

IDS, WEIGHTS = np.array([[0, 1], [2, -1], [7, 3]]), np.full((3, 2), 0.5)
HIDDEN = np.random.default_rng(5).standard_normal((3, 64))


def refuses(words, call, *args, **named):
    try:
        call(*args, **named)
    except ValueError as error:
        assert words in str(error), f"{words!r} is not in {str(error)!r}"
        return
    raise AssertionError(f"nothing was raised; expected {words!r}")


def test_bf16_rounds_to_nearest_even():
    def bits(value):
        return int(example.to_bf16(np.array([value]))[0])

    assert bits(1.0) == 0x3F80 and bits(-2.5) == 0xC020
    assert bits(1 + 2**-8) == 0x3F80, "a tie goes to the even neighbour below"
    assert bits(1 + 3 * 2**-8) == 0x3F82, "a tie goes to the even neighbour above"
    assert bits(1 + 2**-8 + 2**-20) == 0x3F81
    assert bits(3.4e38) == 0x7F80 and bits(np.inf) == 0x7F80 and bits(np.nan) == 0x7FC0 and bits(-0.0) == 0x8000
    assert list(example.from_bf16(example.to_bf16([0.5, -3.0]))) == [0.5, -3.0]
    before = np.array([1.0, np.nan], np.float32)
    example.to_bf16(before)
    assert before[0] == 1


def test_types_of_hidden():
    with Server() as s:
        client = example.Client(s.urls[0])
        want, info = client.forward(HIDDEN.astype(np.float32), IDS, WEIGHTS)
        assert want.dtype == np.float32 and want.shape == (3, 64) and info["rows"] == 3
        assert np.isfinite(want).all() and np.abs(want).max() > 0
        same = client.forward(HIDDEN.astype(np.float32).astype(np.float64), IDS.astype(np.int32), WEIGHTS.tolist())[0]
        assert (same == want).all(), "float64 is sent as FP32"
        bits = client.forward(example.to_bf16(HIDDEN), IDS, WEIGHTS, datatype="BF16")[0]
        for hidden in (HIDDEN, HIDDEN.astype(np.float32), HIDDEN.tolist()):
            assert (client.forward(hidden, IDS, WEIGHTS, datatype="BF16")[0] == bits).all(), "floats are rounded, not cast by value"
        assert bits.dtype == np.uint16
        half = client.forward(HIDDEN.astype(np.float16), IDS, WEIGHTS)[0]
        assert half.dtype == np.float16
        assert (client.forward(HIDDEN, IDS, WEIGHTS, datatype="FP16")[0] == half).all()
        for other in (example.from_bf16(bits), half.astype(np.float32)):
            assert np.linalg.norm(other - want) < 2e-2 * np.linalg.norm(want)
        assert (client.forward(HIDDEN[::-1].astype(np.float32), IDS[::-1], WEIGHTS)[0][::-1] == want).all(), "strides are followed"
        assert client.forward(HIDDEN, IDS, WEIGHTS, adapters=["", "", ""])[0].shape == (3, 64)


def test_refusals():
    client = example.Client("http://127.0.0.1:1")  # nothing may be sent
    refuses("say datatype=", client.forward, example.to_bf16(HIDDEN), IDS, WEIGHTS)
    refuses("only be sent as BF16", client.forward, example.to_bf16(HIDDEN), IDS, WEIGHTS, datatype="FP32")
    refuses("takes BF16, FP16 or FP32", client.forward, HIDDEN, IDS, WEIGHTS, datatype="bf16")
    refuses("takes floats", client.forward, np.ones((3, 64), int), IDS, WEIGHTS)
    refuses("takes [T, H]", client.forward, HIDDEN[0], IDS, WEIGHTS)
    refuses("takes [3, K]", client.forward, HIDDEN, IDS[:2], WEIGHTS)
    refuses("takes integers", client.forward, HIDDEN, IDS.astype(float), WEIGHTS)
    refuses("below -1", client.forward, HIDDEN, IDS - 1, WEIGHTS)
    refuses("must be the same", client.forward, HIDDEN, IDS, WEIGHTS[:, :1])
    refuses("2 names for 3 rows", client.forward, HIDDEN, IDS, WEIGHTS, adapters=["", ""])
    refuses("a list", client.forward, HIDDEN, IDS, WEIGHTS, adapters="abc")
    refuses("takes strings", client.forward, HIDDEN, IDS, WEIGHTS, adapters=["", None, ""])


def test_urls():
    path = os.path.join(tempfile.mkdtemp(prefix="expertd-http-"), "s")
    with Server(listen=("127.0.0.1:0", "unix:" + path)) as s:
        for url in (s.urls[0], s.urls[0] + "/", f"{local_name()}:{s.port}", f"127.0.0.1:{s.port}", "unix:" + path):
            assert example.Client(url).get("/moe/model")["hidden_size"] == 64, url
        try:
            example.Client(s.urls[0]).get("/nowhere")
        except example.Failure as failure:
            assert failure.status == 404 and "404 " in str(failure)
        else:
            raise AssertionError("404 is no failure")
    os.rmdir(os.path.dirname(path))
    for url, words in (("https://localhost:8080", "plain HTTP"), ("http://", "not http://"), ("http://host:1/path", "not http://"),
                       ("unix:", "path"), ("localhost:port", "port"), ("", "not http://")):
        refuses(words, example.Client, url)


def test_connections_that_end():
    """A server that was restarted between two calls is not noticed; one that goes away, or is not there, is one error, not one for ever."""
    folder = tempfile.mkdtemp(prefix="expertd-http-")
    url = "unix:" + os.path.join(folder, "s")
    with Server(listen=(url,)):
        client = example.Client(url)
        assert client.get("/health/live")
    for _ in range(2):
        try:
            client.get("/health/live")
        except OSError:
            pass
        else:
            raise AssertionError("nobody listens, and nothing was raised")
    with Server(listen=(url,)):
        assert client.forward(HIDDEN, IDS, WEIGHTS)[0].shape == (3, 64)
    with Server(listen=(url,)):
        assert client.forward(HIDDEN, IDS, WEIGHTS)[0].shape == (3, 64), "restarted between two calls"
    shutil.rmtree(folder, ignore_errors=True)

    with socket.socket() as listener:  # cuts one request off in the middle, and answers the next
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve():
            for answer in (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"):
                peer = listener.accept()[0]
                peer.recv(65536)
                peer.sendall(answer)
                peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        client = example.Client(f"127.0.0.1:{listener.getsockname()[1]}")
        try:
            client.get("/")
        except (OSError, http.client.HTTPException):
            pass
        else:
            raise AssertionError("half an answer is no failure")
        assert client.get("/") == {}
        thread.join(10)


run(globals())

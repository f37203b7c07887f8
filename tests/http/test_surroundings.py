# SPDX-License-Identifier: Apache-2.0
"""What the process is given: descriptors, names that are not text, no room for uploads."""
import resource

from harness import *

NAME = "qwen3_moe"


def test_closed_standard_descriptors():
    """The log must not go where a socket or file now has its descriptor."""
    folder = tempfile.mkdtemp()
    try:
        for closed in ((0,), (1,), (2,), (0, 1, 2)):
            path = os.path.join(folder, "s%d" % len(os.listdir(folder)))

            def close():
                for fd in closed:
                    os.close(fd)

            p = subprocess.Popen([EXPERTD, *SYNTHETIC, "--listen", "unix:" + path, "--spool-dir", folder], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=close)
            try:
                end = time.monotonic() + 20 * SLOW
                with socket.socket(socket.AF_UNIX) as c:
                    while c.connect_ex(path) != 0:
                        assert time.monotonic() < end and p.poll() is None, closed
                        time.sleep(0.02)
                    for fd in closed:
                        assert os.readlink(f"/proc/{p.pid}/fd/{fd}") == "/dev/null", (closed, fd)
                    c.sendall(b"GET /health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                    assert read_all(c).startswith(b"HTTP/1.1 200")
                p.terminate()
                assert p.wait(20 * SLOW) == 0
            finally:
                p.poll() is None and p.kill()
    finally:
        shutil.rmtree(folder)


def refused(*options):
    r = subprocess.run([EXPERTD, "--listen", "127.0.0.1:0", "--spool-dir", tempfile.gettempdir(), *options], capture_output=True, timeout=20 * SLOW)
    assert r.returncode == 2 and b"--model-name" in r.stderr, r


def test_model_names():
    """A name that JSON or a URL can't hold is refused at the start, not with every reply."""
    for name in ("\udcff", "a\nb", "\x7f", "\u00e4\udce4", "x" * 256):
        refused("--model-name", name, *SYNTHETIC)
    folder = tempfile.mkdtemp()
    try:
        odd = os.path.join(folder, "odd\udcff")
        os.symlink(fixture(NAME), os.path.join(folder, "link"))
        shutil.copytree(fixture(NAME), odd)
        refused("--model", odd)
        for options, name in ((("--model", odd, "--model-name", "m\u00f6/e?"), "m%C3%B6%2Fe%3F"), (("--model", os.path.join(folder, "link")), NAME)):
            with Server(*options) as s:
                for method, path in (("GET", "/v2/models/" + name), ("GET", "/v2/models/" + name + "/config"), ("GET", "/v2/models/stats"), ("GET", "/v1/models"),
                                     ("GET", "/moe/model"), ("POST", "/v2/repository/index")):
                    r = s.call(method, path)
                    assert r.status == 200, (path, r)
                    r.json()
                assert s.call("GET", "/metrics").body.decode()
    finally:
        shutil.rmtree(folder)


def test_no_room_for_uploads():
    """Files may not grow past a limit, as on a full disk: the upload fails with a sentence, is cleared away, and the server goes on."""
    config, weights = adapter_files(NAME, "adapter_2d_0")
    limit = len(weights) - 1000
    with Server(fixture_name=NAME, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) as s:
        body, headers = multipart([("adapter_config", config), ("adapter_model", weights)])
        for _ in range(3):
            r = s.call("PUT", "/adapters/x", body, headers)
            check_error(r, 500, "internal", "--spool-dir")
            assert [f for _, _, files in os.walk(s.spool) for f in files] == []
        assert s.call("GET", "/adapters").json() == {"adapters": []}
        assert s.call("POST", "/adapters", {"name": "x", "path": "adapter_2d_0"}).status == 201


run(globals())

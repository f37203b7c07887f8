# SPDX-License-Identifier: Apache-2.0
"""Keys: which calls need which, and what is taken without any."""
from harness import *

DATA, ADMIN = "data-key_1", "admin-key~2"
OPEN = [("GET", "/health/live"), ("GET", "/health/ready"), ("GET", "/v2/health/live"), ("GET", "/v2/health/ready")]
DATA_CALLS = [("POST", "/moe/forward"), ("GET", "/moe/model"), ("GET", "/adapters"), ("GET", "/adapters/x"), ("GET", "/v1/models"), ("GET", "/v2"),
              ("GET", "/v2/models/synthetic"), ("GET", "/v2/models/synthetic/ready"), ("GET", "/v2/models/synthetic/config"), ("GET", "/v2/models/stats"),
              ("POST", "/v2/models/synthetic/infer"), ("GET", "/openapi.json"), ("HEAD", "/moe/model")]
ADMIN_CALLS = [("POST", "/adapters"), ("PUT", "/adapters/x"), ("DELETE", "/adapters/x"), ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
               ("POST", "/v2/repository/index")]


class Keys:
    def __init__(self, data=DATA + "\n", admin=ADMIN + "\r\n"):
        self.folder = tempfile.mkdtemp()
        self.options = []
        for name, key in (("api", data), ("admin", admin)):
            if key is not None:
                path = os.path.join(self.folder, name)
                with open(path, "w") as f:
                    f.write(key)
                self.options += [f"--{name}-key-file", path]

    def __enter__(self):
        return self.options

    def __exit__(self, *_):
        shutil.rmtree(self.folder)


def call(server, method, path, key):
    return server.call(method, path, b"{}" if method in ("POST", "PUT") else None, {"Authorization": key} if key is not None else {})


def denied(reply, status, code, vllm=False):
    assert reply.status == status, reply
    if reply.body and not vllm:
        assert reply.json()["code"] == code, reply
    if status == 401:
        assert reply.headers["www-authenticate"].startswith("Bearer"), reply


def test_matrix():
    with Keys() as options, Server(*options) as s:
        wrong = [None, "", "Bearer", "Bearer ", "Bearer x", "Basic " + DATA, DATA, "Bearer " + DATA + "x", "Bearer " + DATA[:-1], "Bearer " + DATA.upper(),
                 "Bearer " + "x" * 5000, "Bearer " + DATA + " " + ADMIN]
        for method, path in OPEN:
            assert call(s, method, path, None).status == 200
        for method, path in DATA_CALLS + [("GET", "/metrics")]:
            for key in wrong:
                denied(call(s, method, path, key), 401, "unauthorized", path.startswith("/v1"))
            for key in ("Bearer " + DATA, "bearer " + DATA, "Bearer  " + DATA, "Bearer " + ADMIN):
                assert call(s, method, path, key).status not in (401, 403), (method, path, key)
        for method, path in ADMIN_CALLS:
            for key in wrong:
                denied(call(s, method, path, key), 401, "unauthorized", path.startswith("/v1"))
            denied(call(s, method, path, "Bearer " + DATA), 403, "forbidden", path.startswith("/v1"))
            assert call(s, method, path, "Bearer " + ADMIN).status not in (401, 403), (method, path)
        denied(s.call("POST", "/moe/forward", b"x" * 1000000), 401, "unauthorized")
        assert s.call("GET", "/nope").status == 404
        s.signal(signal.SIGTERM)
        assert s.wait() == 0
        assert not any(DATA in line or ADMIN in line for line in s.log if line), "keys are never logged"


def test_one_key_only():
    with Keys(admin=None) as options, Server(*options) as s:
        for method, path in DATA_CALLS:
            denied(call(s, method, path, None), 401, "unauthorized", path.startswith("/v1"))
        for method, path in ADMIN_CALLS:
            assert call(s, method, path, None).status not in (401, 403), "from loopback, without an admin key"
    with Keys(data=None) as options, Server(*options) as s:
        for method, path in DATA_CALLS + [("GET", "/metrics")]:
            assert call(s, method, path, None).status not in (401, 403)
        for method, path in ADMIN_CALLS:
            denied(call(s, method, path, None), 401, "unauthorized", path.startswith("/v1"))
            denied(call(s, method, path, "Bearer " + DATA), 401, "unauthorized", path.startswith("/v1"))


def test_metrics_open():
    with Keys() as options, Server(*options, "--metrics-open") as s:
        assert call(s, "GET", "/metrics", None).status == 200
        assert call(s, "GET", "/moe/model", None).status == 401


def test_admin_without_key_needs_a_local_listener():
    with Server(listen=("0.0.0.0:0",)) as s:
        s.urls[0] = s.urls[0].replace("0.0.0.0", "127.0.0.1")
        for method, path in ADMIN_CALLS:
            denied(call(s, method, path, None), 403, "forbidden", path.startswith("/v1"))
        assert forward(s, tokens()).status == 200 and call(s, "GET", "/adapters", None).status == 200
    folder = tempfile.mkdtemp()
    with Server(listen=(f"unix:{folder}/s",)) as s:
        assert call(s, "POST", "/v2/repository/index", None).status == 200
    shutil.rmtree(folder)


def test_keys_are_read_again():
    folder = tempfile.mkdtemp()
    api, admin = f"{folder}/api", f"{folder}/admin"

    def write(a, b):
        for path, content in ((api, a), (admin, b)):
            with open(path, "w") as f:
                f.write(content)

    def allowed(s, key, path="/adapters"):
        return s.call("GET" if path == "/adapters" else "POST", path, None, {"Authorization": f"Bearer {key}"}).status == 200

    def again(s, wanted):
        seen = len([line for line in s.log if line and "SIGHUP" in line])
        s.signal(signal.SIGHUP)
        end = time.monotonic() + 20 * SLOW
        while len([line for line in s.log if line and "SIGHUP" in line]) == seen and time.monotonic() < end:
            time.sleep(0.01)
        last = [line for line in s.log if line and "SIGHUP" in line][-1]
        assert re.search(wanted, last), last

    write("one", "chief")
    with Server("--api-key-file", api, "--admin-key-file", admin) as s:
        assert allowed(s, "one") and not allowed(s, "two")
        write("two", "boss")
        assert allowed(s, "one") and not allowed(s, "two"), "nobody asked for it yet"
        again(s, "info SIGHUP: the key files were read again")
        assert allowed(s, "two") and not allowed(s, "one")
        assert allowed(s, "boss", "/v2/repository/index") and not allowed(s, "chief", "/v2/repository/index")
        write("three", "")  # one bad file keeps both keys
        again(s, "error SIGHUP: the keys stay as they are: .*admin is empty")
        assert allowed(s, "two") and not allowed(s, "three") and allowed(s, "boss", "/v2/repository/index")
        os.unlink(api)
        again(s, "error SIGHUP: .*api: No such file")
        assert allowed(s, "two")
        os.mkfifo(api)  # that nobody writes to
        again(s, "error SIGHUP: .*api: nothing came from it")
        assert allowed(s, "two")
    with Server() as s:
        again(s, "info SIGHUP: there are no key files")
        assert s.call("GET", "/health/live").status == 200
    shutil.rmtree(folder)


def test_key_files():
    for content in ("", "\n", " \t\r\n", "a b", "a\x00b", "\u00e4", "a\nb", "x" * 5000):
        with Keys(data=content) as options:
            r = subprocess.run([EXPERTD, *SYNTHETIC, "--listen", "127.0.0.1:0", *options], capture_output=True, text=True, timeout=20 * SLOW)
            assert r.returncode == 2 and "key file" in r.stderr and "listening" not in r.stderr, (content, r)
    r = subprocess.run([EXPERTD, *SYNTHETIC, "--listen", "127.0.0.1:0", "--api-key-file", "/nowhere"], capture_output=True, text=True, timeout=20 * SLOW)
    assert r.returncode == 2 and "/nowhere" in r.stderr, r


run(globals())

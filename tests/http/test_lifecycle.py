# SPDX-License-Identifier: Apache-2.0
"""Start, drain and end; listeners of every kind; service managers."""
from harness import *

SLOW_MODEL = [*LASTING, "--max-batch-rows", "32", "--max-body-bytes", "64M"]
LOADS_LONG = ["--synthetic", "E=64,K=2,H=2048,I=2048,L=2"]


def long_request(server, rows=1200):
    """A socket on which an answer will come after a while, but before a drain times out."""
    c = server.connect()
    c.sendall(heavy(rows, 1024, 8))
    return c


def running(server):
    """Waits until a request is waiting or being computed."""
    eventually(lambda: re.search(r"^expertd_(queue|running)_rows [1-9]", server.call("GET", "/metrics").body.decode(), re.M))


def test_drain():
    with Server(*SLOW_MODEL) as s:
        kept = s.client()
        assert kept.call("GET", "/moe/model").status == 200
        c = long_request(s)
        running(s)
        s.signal()
        s.wait_log("draining")
        check_error(s.call("GET", "/health/ready"), 503, "draining")
        check_error(s.call("GET", "/v2/health/ready"), 503, "draining")
        assert s.call("GET", "/health/live").status == 200
        assert s.call("GET", "/metrics").status == 200
        r = kept.call("GET", "/moe/model")
        check_error(r, 503, "draining")
        assert r.headers["connection"] == "close" and r.headers["retry-after"]
        r = s.call("POST", "/moe/forward", b"x" * 100000)
        check_error(r, 503, "draining")
        check_error(s.call("POST", "/adapters", {"name": "a", "path": "b"}), 503, "draining")
        check_error(s.call("DELETE", "/adapters/a"), 503, "draining")
        reply, _ = read_reply(c, 60)
        assert reply.status == 200 and reply.headers["connection"] == "close", reply
        assert s.wait() == 0


def test_idle_drain_is_quick():
    with Server() as s, s.client() as kept:
        kept.call("GET", "/health/live")
        began = time.monotonic()
        s.signal(signal.SIGINT)
        assert s.wait() == 0 and time.monotonic() - began < 10 * SLOW


def test_drain_is_bounded():
    with Server("--drain-timeout-s", "1") as s:
        with s.connect() as c:
            c.sendall(b"POST /moe/forward HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nx")
            time.sleep(0.2)
            began = time.monotonic()
            s.signal()
            assert s.wait() == 1
            assert 0.8 < time.monotonic() - began < 10 * SLOW
            assert any("drain timed out" in line for line in s.log if line)


def test_second_signal():
    folder = tempfile.mkdtemp()
    with Server("--drain-timeout-s", "60", listen=(f"unix:{folder}/s",)) as s:
        with s.connect() as c:
            c.sendall(b"POST /moe/forward HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\nx")
            time.sleep(0.2)
            s.signal()
            s.wait_log("draining")
            assert s.process.poll() is None
            s.signal()
            assert s.wait(20) == 128 + signal.SIGTERM
            assert not os.path.exists(f"{folder}/s")
    shutil.rmtree(folder)


def test_while_loading():
    with Server(*LOADS_LONG, ready=False) as s:
        assert s.call("GET", "/health/live").status == 200
        ready = s.call("GET", "/health/ready")
        if ready.status != 200:  # unless it was quicker than we
            check_error(ready, 503, "not_ready")
            r = s.call("POST", "/moe/forward", b"{}")
            if r.status == 503:
                check_error(r, 503, "not_ready")
                assert r.headers["retry-after"]
            assert s.call("GET", "/metrics").status == 200
        s.signal()
        assert s.wait() == 0
        check = [line for line in s.log if line and " error " in line]
        assert not check, check


def test_options_are_checked_before_listening():
    folder = tempfile.mkdtemp()
    model = ["--model", fixture("olmoe")]
    os.mkdir(f"{folder}/no-config")
    shutil.copy(os.path.join(fixture("olmoe"), "model.safetensors"), f"{folder}/no-config/")
    shutil.copytree(f"{folder}/no-config", f"{folder}/bad-config")
    with open(f"{folder}/bad-config/config.json", "w") as f:
        f.write("{")
    shutil.copytree(fixture("olmoe"), f"{folder}/quantised")
    with open(f"{folder}/quantised/config.json", "w") as f:
        f.write('{"quantization_config": {"quant_method": "fp8"}}')
    shutil.copytree(fixture("olmoe"), f"{folder}/bad-header")
    with open(f"{folder}/bad-header/model.safetensors", "wb") as f:
        f.write(b"\0" * 100)
    for options, words in (
            (["--model", "/nowhere"], "/nowhere"),
            (["--model", folder], "holds neither"),
            (["--model", f"{folder}/no-config"], "config.json"),
            (["--model", f"{folder}/bad-config"], "config.json"),
            (["--model", f"{folder}/quantised"], "quantised by fp8"),
            (["--model", f"{folder}/bad-header"], "model.safetensors"),
            (model + ["--family", "nonsense"], "--family: \"nonsense\""),
            (model + ["--layers", "0-"], "--layers"),
            (model + ["--experts", "3-1"], "--experts"),
            (model + ["--layers", "99"], "--layers: there are no experts in layer 99"),
            (model + ["--layers", "0-99"], "--layers: there is no layer 99"),
            (model + ["--experts", "0-999"], "--experts: there is no expert 999"),
            (model + ["--dtype", "fp8"], "--dtype"),
            (model + ["--adapter-root", f"{folder}/none"], "adapter-root"),
            (model + ["--adapter", f"a={folder}/none"], "--adapter"),
            (model + ["--adapter", f"a b={folder}"], "--adapter"),
            (model + ["--adapter", f"a={folder}", "--adapter", f"ab={folder}", "--adapter", f"a={folder}/bad-config"], f"--adapter a={folder} has the same name"),
            (model + ["--device", "cuda:99"], "cuda:99"),
            (model + ["--spool-dir", f"{folder}/none"], "--spool-dir"),
            (model + ["--listen", "8080"], "--listen 8080"),
            (model + ["--listen", "127.0.0.1:99999"], "--listen 127.0.0.1:99999: a port is 0 to 65535"),
            (model + ["--listen", "127.0.0.1:080808"], "a port is 0 to 65535"),
            (model + ["--listen", "unix:" + "x" * 200], "--listen unix:"),
            (["--synthetic", "E=8"], "--synthetic"),
            (["--synthetic", "E=8,K=9,H=64,I=64,L=1"], "K=9")):
        r = subprocess.run([EXPERTD, "--spool-dir", folder, "--listen", "127.0.0.1:0", *options], capture_output=True, text=True, timeout=20 * SLOW)
        assert r.returncode == 2 and words in r.stderr and "listening" not in r.stderr, (options, r)
        assert len(r.stderr.splitlines()) == 1, r.stderr
    shutil.rmtree(folder)


def test_adapters_are_checked_before_loading():
    """All that an install would refuse without a look at values; what only they tell is refused after."""
    folder = tempfile.mkdtemp()
    good = os.path.join(fixture("qwen3_moe"), "adapter_2d_0")

    def spoil(name, file=None, change=None):
        shutil.copytree(good, f"{folder}/{name}")
        if file:
            with open(f"{folder}/{name}/{file}", "rb") as f:
                data = change(f.read())
            with open(f"{folder}/{name}/{file}", "wb") as f:
                f.write(data)
        return f"{folder}/{name}"

    def with_rank(data):
        config = json.loads(data)
        return json.dumps({**config, "r": config["r"] + 1}).encode()

    os.mkdir(f"{folder}/empty")
    tensors, config = "adapter_model.safetensors", "adapter_config.json"
    for path, words, early in (
            (os.path.join(fixture("mixtral"), "adapter_2d_0"), "hidden size", True),
            (f"{folder}/empty", "no adapter_config.json", True),
            (spoil("json", config, lambda data: b"{"), config, True),
            (spoil("rank", config, with_rank), "rank by adapter_config.json", True),
            (spoil("header", tensors, lambda data: data[:100]), tensors, True),
            (spoil("short", tensors, lambda data: data[:-1]), tensors, True),
            (spoil("value", tensors, lambda data: data[:-4] + b"\xff" * 4), "not finite", False)):
        r = subprocess.run([EXPERTD, "--spool-dir", folder, "--listen", "127.0.0.1:0", "--model", fixture("qwen3_moe"), "--adapter", f"good={good}",
                            "--adapter", f"bad={path}"], capture_output=True, text=True, timeout=20 * SLOW)
        assert r.returncode == 2 and re.search(f"error --adapter bad={path}: .*{words}", r.stderr), (path, r)
        assert ("loading weights" in r.stderr) != early, (path, r.stderr)
    shutil.rmtree(folder)


def test_bad_weights():
    folder = tempfile.mkdtemp()
    shutil.copy(os.path.join(fixture("olmoe"), "config.json"), folder)
    with open(os.path.join(fixture("olmoe"), "model.safetensors"), "rb") as f:
        names = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    with open(f"{folder}/model.safetensors.index.json", "w") as f:
        json.dump({"weight_map": {name: "shard-1.safetensors" for name in names if name != "__metadata__"}}, f)
    with Server("--model", folder, ready=False) as s:
        assert s.wait() == 2 and any("shard-1.safetensors" in line for line in s.log if line), s.log
    shutil.rmtree(folder)


def test_check_ends_as_serving_would():
    model = fixture("olmoe")
    for options, status in (([model], 0), (["/nowhere"], 2), ([model, "--layers", "99"], 2), ([fixture("mixtral") + "/adapter_2d_0", "--model", model], 2)):
        r = subprocess.run([EXPERTD, "--check", *options], capture_output=True, text=True, timeout=20 * SLOW)
        assert r.returncode == status, (options, r)


def test_install_during_drain():
    with Server(*SLOW_MODEL, "--adapter-root", FIXTURES) as s:
        c = long_request(s)
        running(s)
        body, headers = multipart([("adapter_config", b"{}"), ("adapter_model", b"x" * 1000)])
        put = s.connect()
        put.sendall(f"PUT /adapters/x HTTP/1.1\r\nHost: a\r\nContent-Type: {headers['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:200])
        time.sleep(0.2)
        s.signal()
        s.wait_log("draining")
        put.sendall(body[200:])
        check_error(read_reply(put)[0], 400, "bad_adapter")  # it was accepted, and is judged to the end
        check_error(s.call("PUT", "/adapters/y", body, headers), 503, "draining")
        assert read_reply(c, 60)[0].status == 200
        assert s.wait() == 0
        assert os.listdir(s.spool) == []


def test_listeners():
    folder = tempfile.mkdtemp()
    path = f"{folder}/s"
    addresses = ["127.0.0.1:0", f"{local_name()}:0", f"unix:{path}"]
    v6 = socket.has_ipv6
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
        addresses.insert(2, "[::1]:0")
    except OSError:
        v6 = False
    with Server(listen=tuple(addresses)) as s:
        assert len(s.urls) == len(addresses), s.urls
        assert s.urls[-1] == f"unix:{path}" and re.fullmatch(r"http://127\.0\.0\.1:\d+", s.urls[0]), s.urls
        if v6:
            assert re.fullmatch(r"http://\[::1\]:\d+", s.urls[2]), s.urls
        assert os.stat(path).st_mode & 0o777 == 0o660
        want = None
        for i in range(len(addresses)):
            s.urls.insert(0, s.urls.pop(i))
            out = forward(s, tokens()).json()["outputs"]
            assert want in (None, out)
            want = out
    assert not os.path.exists(path)
    # A dead socket's file is replaced; a living one's, a file's and a taken port are not.
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(path)
    dead.close()
    with Server(listen=(f"unix:{path}",)) as s:
        r = subprocess.run([EXPERTD, *SYNTHETIC, "--listen", f"unix:{path}"], capture_output=True, text=True, timeout=20 * SLOW)
        assert r.returncode == 1 and path in r.stderr, r
        assert s.call("GET", "/health/live").status == 200
        # Somebody else's socket under our name stays when we go.
        os.unlink(path)
        other = socket.socket(socket.AF_UNIX)
        other.bind(path)
    assert os.path.exists(path)
    other.close()
    os.unlink(path)
    with open(path, "w") as f:
        f.write("precious")
    r = subprocess.run([EXPERTD, *SYNTHETIC, "--listen", f"unix:{path}"], capture_output=True, text=True, timeout=20 * SLOW)
    assert r.returncode == 1 and open(path).read() == "precious", r
    shutil.rmtree(folder)
    with Server() as s:
        r = subprocess.run([EXPERTD, *SYNTHETIC, "--listen", s.urls[0][7:]], capture_output=True, text=True, timeout=20 * SLOW)
        assert r.returncode == 1 and s.urls[0][7:] in r.stderr, r
    for wrong in ("", "localhost", "1.2.3.4", "::1:80", "[::1]", "127.0.0.1:70000", "127.0.0.1:x", "unix:", "unix:" + "x" * 200, "no.such.host.invalid:1"):
        r = subprocess.run([EXPERTD, *SYNTHETIC, "--listen", wrong], capture_output=True, text=True, timeout=30 * SLOW)
        assert r.returncode == (1 if wrong.startswith("no.such") else 2) and "--listen" in r.stderr, (wrong, r)


def test_socket_handed_over():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(10)
    port = listener.getsockname()[1]
    early = socket.create_connection(("127.0.0.1", port))  # waits in the backlog until the server is there
    early.sendall(b"GET /health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    def prepare():
        os.dup2(listener.fileno(), 3)
        os.set_inheritable(3, True)

    wrap = ["/bin/sh", "-c", 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"', "sh"]
    with Server(listen=(), wrap=wrap, preexec_fn=prepare, close_fds=False) as s:
        assert s.urls == [f"http://127.0.0.1:{port}"], s.urls
        assert read_all(early).startswith(b"HTTP/1.1 200")
        assert forward(s, tokens()).status == 200
    early.close()
    listener.close()


def test_service_manager():
    folder = tempfile.mkdtemp()
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(f"{folder}/notify")
    manager.settimeout(20 * SLOW)
    with Server(env={"NOTIFY_SOCKET": f"{folder}/notify"}) as s:
        assert manager.recv(100) == b"READY=1"
        s.signal()
        assert manager.recv(100) == b"STOPPING=1"
        assert s.wait() == 0
    manager.close()
    shutil.rmtree(folder)
    name = f"\0expertd-test-{os.getpid()}"
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(name)
    manager.settimeout(20 * SLOW)
    with Server(env={"NOTIFY_SOCKET": "@" + name[1:]}):
        assert manager.recv(100) == b"READY=1"
    manager.close()


def test_descriptors():
    """None is inherited by children or lost over many connections."""
    with Server() as s:
        folder = f"/proc/{s.process.pid}/fd"
        for f in os.listdir(folder):
            if int(f) > 2:
                try:
                    flags = open(f"/proc/{s.process.pid}/fdinfo/{f}").read()
                except FileNotFoundError:
                    continue  # of a connection that has closed meanwhile
                mode = int(re.search(r"flags:\s+(\d+)", flags).group(1), 8)
                assert mode & os.O_CLOEXEC, (f, mode)

        def settled():
            last, end = -1, time.monotonic() + 10 * SLOW
            while time.monotonic() < end:
                now = len(os.listdir(folder))
                if now == last:
                    return now
                last = now
                time.sleep(0.4)
            return last

        before = settled()
        for i in range(100):
            s.call("GET", "/health/live")
            s.call("POST", "/nope", b"x" * 1000)
            if i % 10 == 0:
                s.raw(b"nonsense\r\n\r\n")
        assert settled() <= before + 2, (before, os.listdir(folder))


run(globals())

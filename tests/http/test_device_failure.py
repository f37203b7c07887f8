# SPDX-License-Identifier: Apache-2.0
"""A device that is lost under a serving daemon: everybody is told, and the process ends so that it is started anew."""
from harness import *

PROGRAM = os.environ.get("EXPERTD_FAILING_DEVICE", os.path.join(HERE, "..", "..", "build", "tests", "http", "expertd_failing_device"))


class Device:
    """The folder through which the device is told what to do."""

    def __enter__(self):
        self.folder = tempfile.mkdtemp()
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder)

    def tell(self, what):
        open(os.path.join(self.folder, what), "w").close()

    def serve(self):
        return Server("--device", "cpu", program=PROGRAM, env={"FAILING_DEVICE": self.folder})


@aside
def test_requests_in_flight():
    with Device() as device:
        s = device.serve()
        try:
            assert forward(s, tokens()).status == 200
            device.tell("hold")
            waiting, (body, _) = [], forward_body(tokens())

            def post():
                waiting.append(s.connect())
                waiting[-1].sendall(b"POST /moe/forward HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

            post()
            eventually(lambda: gauge(s, "expertd_running_rows") > 0)
            for _ in range(3):
                post()
            eventually(lambda: gauge(s, "expertd_queue_requests") == 3)
            assert s.call("GET", "/health/ready").status == 200
            device.tell("fail")
            for c in waiting:
                check_error(read_reply(c)[0], 503, "device_failed")
                c.close()
            check_error(s.call("GET", "/health/ready"), 503, "device_failed")
            check_error(s.call("GET", "/v2/health/ready"), 503, "device_failed")
            check_error(forward(s, tokens()), 503, "device_failed")
            check_error(s.call("POST", "/adapters", {"name": "a", "path": "b"}), 503, "device_failed")
            assert s.call("GET", "/health/live").status == 200
            assert re.search(r'nv_inference_request_failure\{[^}]*reason="BACKEND"[^}]*\} [4-9]', s.call("GET", "/metrics").body.decode())
            assert s.wait() == 1
            assert [line for line in s.log if line and " error the device has failed: the device was told to fail" in line], s.log
        finally:
            s.stop()


@aside
def test_idle():
    with Device() as device:
        s = device.serve()
        try:
            assert forward(s, tokens()).status == 200
            device.tell("fail")
            s.wait_log("error the device has failed", 30)
            check_error(s.call("GET", "/health/ready"), 503, "device_failed")
            assert s.wait() == 1
        finally:
            s.stop()


run(globals())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The plug is pulled (SIGKILL) in the middle of work, and the next start finds nothing in its way."""
import os
import signal
import socket
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "http"))
from harness import Server, adapter_files, forward, multipart, run, tokens  # noqa: E402

FIXTURE = "qwen3_moe"


def test_restart_after_kill():
    """Same Unix socket, same spool folder: the leftovers of the killed server are cleared, and old adapter ids are refused."""
    with tempfile.TemporaryDirectory() as folder:
        path, spool = os.path.join(folder, "socket"), os.path.join(folder, "spool")
        os.mkdir(spool)
        old_id = None
        for _ in range(3):
            server = Server(fixture_name=FIXTURE, listen=("unix:" + path,), spool=spool)
            try:
                if old_id is not None:
                    reply = forward(server, qwen_tokens() + [("adapter_id", "INT32", [2], [old_id, -1])], parameters={"layer": 0})
                    assert reply.status == 404 and reply.json()["code"] == "adapter_not_found", reply
                left = [name for name in os.listdir(spool) if str(server.process.pid) not in name]
                assert left == [], f"left in the spool by an earlier life: {left}"
                reply = server.call("POST", "/adapters", {"name": "one", "path": "adapter_2d_0"})
                assert reply.status == 201, reply
                old_id = reply.json()["id"]
                # An upload that never ends, and requests under way.
                half = server.connect()
                body, headers = multipart(list(zip(("adapter_config", "adapter_model"), adapter_files(FIXTURE, "adapter_2d_0"))))
                half.sendall(b"PUT /adapters/two HTTP/1.1\r\nHost: x\r\nContent-Type: " + headers["Content-Type"].encode() +
                             b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body[: len(body) // 2])
                stop = threading.Event()
                workers = [threading.Thread(target=keep_asking, args=(server, stop)) for _ in range(3)]
                for w in workers:
                    w.start()
                time.sleep(0.3)
                server.signal(signal.SIGKILL)
                assert server.wait() == -signal.SIGKILL
                stop.set()
                for w in workers:
                    w.join(20)
                    assert not w.is_alive()
                half.close()
                assert os.path.exists(path), "the killed server could not have unlinked its socket"
            finally:
                server.stop()


def test_socket_of_a_living_server_is_left_alone():
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "socket")
        with Server(listen=("unix:" + path,)) as first:
            try:
                Server(listen=("unix:" + path,)).stop()
                raise RuntimeError("a second server took the socket of the first")
            except AssertionError:
                pass
            assert first.call("GET", "/health/live").status == 200


def qwen_tokens():
    return tokens(rows=2, hidden=128, k=2, experts=16)


def keep_asking(server, stop):
    while not stop.is_set():
        try:
            if forward(server, qwen_tokens(), parameters={"layer": 0}).status != 200:
                return
        except (OSError, ValueError, AssertionError):
            return
        except Exception as error:
            assert type(error).__module__ == "http.client", error
            return


if __name__ == "__main__":
    assert hasattr(socket, "AF_UNIX")
    run(globals())

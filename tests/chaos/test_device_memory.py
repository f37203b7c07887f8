#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A GPU whose memory is full: installs get 507 and change nothing, everything else serves on; what is removed makes room.

Another process (this one) takes the device's memory, all but a little, by the driver's own calls. The emulated device (tests/emulator; with the
argument --emulated) has as little as that from the start, and then a model may not fit, too."""
import ctypes
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "http"))
import harness  # noqa: E402
from harness import Server, check_error, forward, gauge, run, tokens  # noqa: E402

FIXTURE, MIB = "qwen3_moe", 1 << 20
OPTIONS = ("--device", "cuda", "--max-adapters", "2000")
LEAVE, TOTAL = 8 * MIB, 1 << 32


class Driver:
    """What is needed of libcuda.so.1, on its first device. `missing` says why it can't be used."""

    def __init__(self):
        self.missing, self.taken = None, []
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as e:
            self.missing = str(e)
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        for name, *arguments in (("cuInit", 0), ("cuDeviceGet", ctypes.byref(device), 0)):
            error = getattr(self.library, name)(*arguments)
            if error:
                self.missing = f"{name} returns {error}"
                return
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        error = getattr(self.library, name)(*arguments)
        assert error == 0, f"{name} returns {error}"

    def free_bytes(self):
        unused, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(unused), ctypes.byref(total))
        return unused.value

    def take(self, leave):
        """Takes memory until no more than so many bytes are free, or no piece of 2 MiB is left."""
        piece = 64 << 30
        while piece >= 2 * MIB and self.free_bytes() > leave:
            address = ctypes.c_uint64()
            if self.free_bytes() - leave >= piece and self.library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(piece)) == 0:
                self.taken.append(address)
            else:
                piece //= 2

    def give_back(self):
        while self.taken:
            self.call("cuMemFree_v2", self.taken.pop())
        return True

    def serve(self, leave):
        return Server(*OPTIONS, fixture_name=FIXTURE)


class Emulated:
    missing = None

    def used(self):
        with Server(*OPTIONS, fixture_name=FIXTURE, env={"EMULATOR_MEMORY": str(TOTAL)}) as server:
            return TOTAL - int(gauge(server, "expertd_device_memory_free_bytes"))

    def serve(self, leave):
        return Server(*OPTIONS, fixture_name=FIXTURE, env={"EMULATOR_MEMORY": str(self.used() + leave)})

    def take(self, leave):
        pass

    def give_back(self):
        return False


def answer(server, adapter=None, rows=5, k=4):
    info = server.call("GET", "/moe/model").json()
    tensors = tokens(rows=rows, hidden=info["hidden_size"], k=k, experts=info["experts"])
    parameters = {"layer": info["layers"][0], **({"adapter": adapter} if adapter else {})}
    reply = forward(server, tensors, binary=True, parameters={**parameters, "binary_data_output": True})
    assert reply.status == 200, reply
    return reply.body[int(reply.headers["inference-header-content-length"]):]


def install(server, name, path, replace=False):
    return server.call("POST", "/adapters", {"name": name, "path": path, "replace": replace})


def names(server):
    return sorted(a["name"] for a in server.call("GET", "/adapters").json()["adapters"])


def test_full():
    sources = sorted(d for d in os.listdir(harness.fixture(FIXTURE)) if d.startswith("adapter_"))
    with driver.serve(LEAVE) as server:
        base = answer(server)
        driver.take(LEAVE)
        try:
            assert install(server, "kept", sources[0]).status == 201
            adapted = answer(server, "kept")
            assert adapted != base
            installed = []
            refused = 0  # in a row: where a large adapter has no room, a smaller one may
            while len(installed) < 1990 and refused < len(sources):
                reply = install(server, f"filler-{len(installed)}", sources[(len(installed) + refused) % len(sources)])
                refused = refused + 1 if reply.status == 507 else 0
                if not refused:
                    assert reply.status == 201, reply
                    installed.append(f"filler-{len(installed)}")
            print(f"full after {len(installed)} adapters: {reply.json()['error']}")
            check_error(reply, 507, "out_of_device_memory", "of device memory", "are free")
            assert len(installed) > 10
            assert names(server) == sorted(["kept", *installed])
            assert answer(server) == base and answer(server, "kept") == adapted
            # The old one stays when there is no room for the new one beside it.
            check_error(install(server, "kept", sources[1], replace=True), 507, "out_of_device_memory")
            assert answer(server, "kept") == adapted
            # Shapes that were never seen need memory for a captured forward; without it they are computed all the same.
            for rows in (1, 4, 7, 13):
                assert answer(server, "kept", rows, 3)[:len(base) // 5] == answer(server, "kept", 1, 3)
            # What is removed makes room for the like of it, and no more than that.
            for round_ in range(3):
                gone = installed[round_ * len(sources)]
                reply = server.call("DELETE", f"/adapters/{gone}?wait=10")
                assert reply.status == 200, reply
                reply = install(server, gone, sources[0])
                assert reply.status == 201, reply
            assert answer(server) == base and answer(server, "kept") == adapted and answer(server, installed[0]) == adapted
            assert names(server) == sorted(["kept", *installed])
        finally:
            room = driver.give_back()
        if room:
            assert install(server, "late", sources[0]).status == 201
            assert answer(server, "late") == adapted


def start(memory):
    """The answer of a daemon on a device of so many bytes; or what it said was too large, when it ended with status 1."""
    server = Server(*OPTIONS, fixture_name=FIXTURE, ready=False, env={"EMULATOR_MEMORY": str(memory)})
    try:
        line = server.wait_log(r" error | info ready")
        if " error " in line:
            assert "device memory" in line and server.wait() == 1, server.log
            return None, line
        reply = answer(server)
        server.signal()
        assert server.wait() == 0, server.log
        return reply, None
    finally:
        server.stop()


def test_whatever_there_is():
    """From none to enough: the daemon serves the same bits, or ends and says what it lacks. With no room for captured forwards it does without."""
    if not isinstance(driver, Emulated):
        return  # it would take a GPU that nobody else uses
    used = driver.used()
    whole, _ = start(2 * used)
    seen = {}
    for memory in (MIB, used // 10, used // 2, *(used * part // 100 for part in range(90, 100)), *(used - (MIB >> i) for i in range(0, 12, 2))):
        reply, line = start(memory)
        assert reply in (None, whole), memory
        seen.setdefault(line and line.split(" error ")[1][:40], []).append(memory)
    print(f"{used} bytes are used of much;", seen)
    assert None in seen and len(seen) > 1, seen


if __name__ == "__main__":
    driver = Emulated() if "--emulated" in sys.argv else Driver()
    if "--emulated" in sys.argv:
        sys.argv.remove("--emulated")
    if driver.missing:
        print("SKIP:", driver.missing)
        sys.exit(harness.SKIP)
    run(globals())

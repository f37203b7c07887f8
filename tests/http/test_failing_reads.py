# SPDX-License-Identifier: Apache-2.0
"""Files that are there and can't be read: the machine's fault, which starting again may cure, so that the status is 1 and not 2."""
from harness import *

PROGRAM = os.environ.get("EXPERTD_FAILING_READS", os.path.join(HERE, "..", "..", "build", "tests", "http", "expertd_failing_reads"))
NAME = "qwen3_moe"
ADAPTER = "adapter_2d_0"


def end(*options, **failing):
    """How the process ended, and what it wrote."""
    r = subprocess.run([PROGRAM, "--threads", "1", "--spool-dir", tempfile.gettempdir(), *options], capture_output=True, text=True, timeout=60 * SLOW,
                       env={**os.environ, **failing})
    return r.returncode, r.stdout + r.stderr


def test_checkpoints():
    folder, index, shard = fixture(NAME), "model.safetensors.index.json", "model-00003-of-00008.safetensors"
    for failing, listens in ((dict(FAIL_OPEN=NAME), False), (dict(FAIL_OPEN="config.json"), False), (dict(FAIL_READ="config.json"), False),
                             (dict(FAIL_OPEN=index), False), (dict(FAIL_READ=index), False), (dict(FAIL_OPEN=shard), True), (dict(FAIL_READ=shard), True),
                             (dict(FAIL_READ=shard, FAIL_READ_AT="100000"), True)):
        status, text = end("--model", folder, "--listen", "127.0.0.1:0", **failing)
        file = list(failing.values())[0]
        where = folder if file == NAME else f"{folder}/{file}"
        assert status == 1 and f"error {where}: " in text and "Input/output error" in text, (failing, status, text)
        assert ("listening" in text) == listens, (failing, text)
        if "FAIL_READ_AT" not in failing:  # no weights are read then
            status, text = end("--check", folder, **failing)
            assert status == 1 and f"{where}: " in text and "Input/output error" in text, (failing, status, text)


def test_adapters_at_the_start():
    for failing in (dict(FAIL_OPEN=ADAPTER), dict(FAIL_READ="adapter_config.json"), dict(FAIL_OPEN="adapter_model.safetensors"),
                    dict(FAIL_READ="adapter_model.safetensors", FAIL_READ_AT="50000")):
        status, text = end("--model", fixture(NAME), "--listen", "127.0.0.1:0", "--adapter", f"a={fixture(NAME)}/{ADAPTER}", **failing)
        assert status == 1 and "error --adapter a=" in text and "Input/output error" in text, (failing, status, text)


def test_keys():
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "secret-key")
    with open(path, "w") as f:
        f.write("k")
    for option in ("--api-key-file", "--admin-key-file"):
        for failing in (dict(FAIL_OPEN="secret-key"), dict(FAIL_READ="secret-key")):
            status, text = end(*SYNTHETIC, "--listen", "127.0.0.1:0", option, path, **failing)
            assert status == 1 and f"error key file {path}: Input/output error" in text and "listening" not in text, (failing, status, text)
    shutil.rmtree(folder)


def test_adapters_of_clients():
    """That is no fault of theirs, and costs the server nothing else."""
    with Server(fixture_name=NAME, program=PROGRAM, env=dict(FAIL_READ="adapter_model.safetensors", FAIL_READ_AT="50000")) as s:
        r = s.call("POST", "/adapters", {"name": "a", "path": ADAPTER})
        check_error(r, 500, "internal", "adapter_model.safetensors: reading at byte")
        r = s.call("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": ADAPTER})
        assert r.status == 500 and "Input/output error" in r.json()["error"]["message"], r
        check_error(s.call("POST", "/adapters", {"name": "a", "path": "none"}), 400, "bad_adapter", "no folder")
        assert s.call("GET", "/adapters").json() == {"adapters": []}
        assert s.call("GET", "/health/ready").status == 200


run(globals())

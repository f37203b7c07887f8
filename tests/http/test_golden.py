# SPDX-License-Identifier: Apache-2.0
"""Golden values of every fixture, through tests/tools/golden_http.py. Needs numpy; skipped without it."""
import glob

from harness import *

try:
    import numpy  # noqa: F401
except ImportError:
    print("numpy is not installed: golden values are not checked")
    sys.exit(SKIP)


def golden(name):
    with Server(fixture_name=name) as s:
        tool = os.path.join(HERE, "..", "tools", "golden_http.py")
        r = subprocess.run([sys.executable, tool, "--url", s.urls[0], fixture(name)], capture_output=True, text=True, timeout=120 * SLOW)
        print(" ", r.stdout.strip()[:160])
        assert r.returncode == 0, r.stdout + r.stderr


def test_oracle_takes_what_the_server_takes():
    """Adapters mostly adapt attention, too: both leave that aside."""
    sys.path.insert(0, os.path.join(HERE, "..", "tools"))
    import oracle
    with tempfile.TemporaryDirectory() as root:
        plain, mixed = fixture("qwen3_moe/adapter_2d_0"), os.path.join(root, "mixed")
        shutil.copytree(plain, mixed)
        with open(os.path.join(mixed, "adapter_model.safetensors"), "rb") as file:
            data = file.read()
        length = struct.unpack("<Q", data[:8])[0]
        header, end = json.loads(data[8:8 + length]), len(data) - 8 - length
        others = [module + side for module in ("base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.mlp.gate",
                                               "base_model.model.lm_head", "base_model.model.model.layers.0.mlp.shared_expert.up_proj")
                  for side in (".lora_A.weight", ".lora_B.weight")]
        for i, name in enumerate(others):
            header[name] = {"dtype": "F32", "shape": [1, 1], "data_offsets": [end + 4 * i, end + 4 * i + 4]}
        text = json.dumps(header).encode()
        with open(os.path.join(mixed, "adapter_model.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + data[8 + length:] + bytes(4 * len(others)))
        model = oracle.Model(fixture("qwen3_moe"))
        want, got = oracle.Adapter(plain, model).deltas, oracle.Adapter(mixed, model).deltas
        assert want.keys() == got.keys() and all((want[key][i] == got[key][i]).all() for key in want for i in range(2))
        with Server("--adapter-root", root, "--model", fixture("qwen3_moe")) as s:
            r = s.call("POST", "/adapters", json.dumps({"name": "mixed", "path": "mixed"}), {"Content-Type": "application/json"})
            assert r.status in (200, 201) and r.json()["ignored"] == len(others), r.body


found = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(os.path.join(FIXTURES, "*", "config.json")))
assert len(found) >= 6, found
for each in found:
    globals()["test_" + each] = lambda each=each: golden(each)

run(globals())

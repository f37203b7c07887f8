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


found = sorted(os.path.basename(os.path.dirname(p)) for p in glob.glob(os.path.join(FIXTURES, "*", "config.json")))
assert len(found) >= 6, found
for each in found:
    globals()["test_" + each] = lambda each=each: golden(each)

run(globals())

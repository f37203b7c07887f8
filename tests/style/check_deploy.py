#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/ that no other test runs: they parse, and what they name exists."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import sources

DEPLOY = os.path.join(sources.TOP, "deploy")
faults = []


def require(condition, sentence):
    if not condition:
        faults.append(sentence)


def run(*command):
    return subprocess.run(command, cwd=sources.TOP, capture_output=True, text=True)


def check_scripts():
    for path in ["deploy/quickstart", "deploy/test", "deploy/lib.sh", ".ci/run"]:
        result = run("bash", "-n", path)
        require(result.returncode == 0, f"{path}: {result.stderr}")
        if not path.endswith(".sh"):
            require(os.access(os.path.join(sources.TOP, path), os.X_OK), f"{path} is not executable")
            if shutil.which("shellcheck"):
                result = run("shellcheck", "-x", path)
                require(result.returncode == 0, result.stdout)
    for path in sources.code(".py"):
        try:
            ast.parse(sources.read(path), path)
        except SyntaxError as error:
            faults.append(f"{path}: {error}")
    for path in ["deploy/quickstart", "deploy/test"]:
        result = run("bash", path, "--help")
        require(result.returncode == 0 and "usage:" in result.stdout, f"{path} --help fails")
        require(run("bash", path, "--no-such-option").returncode == 1, f"{path} takes unknown options")
    result = run("bash", "deploy/test", "--suite", "unit", "--suite", "nonsense")
    require(result.returncode == 1 and "'nonsense'; there are: " in result.stderr and " unit" in result.stderr, f"deploy/test: suites: {result}")


def check_dockerfile(path):
    text = sources.read(path)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    known = ("FROM", "ARG", "ENV", "RUN", "COPY", "WORKDIR", "USER", "EXPOSE", "LABEL", "HEALTHCHECK", "ENTRYPOINT", "CMD", "STOPSIGNAL", "VOLUME")
    words = [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
    for word in words:
        require(word in known, f"{path}: unknown instruction {word}")
    for word in ("HEALTHCHECK", "ENTRYPOINT", "USER", "LABEL"):
        require(word in words, f"{path}: no {word}")
    require(words.count("FROM") >= 2, f"{path}: not in stages")
    user = [line.split()[1] for line in lines if line.startswith("USER")]
    require(user and user[-1] not in ("root", "0"), f"{path}: runs as root")
    for line in lines:
        if line.startswith("COPY ") and "--from=" not in line:
            for source in line.split()[1:-1]:
                require(source.startswith("--") or os.path.exists(os.path.join(sources.TOP, source)), f"{path}: no {source}")


def check_dockerignore():
    """Everything is left out of the context but what is copied from it."""
    rules = [line for line in sources.read(".dockerignore").splitlines() if line and not line.startswith("#")]
    require(rules[:1] == ["*"], ".dockerignore: does not begin by leaving everything out")
    copied = set()
    for path in ("deploy/Dockerfile", "deploy/Dockerfile.cuda"):
        for line in sources.read(path).splitlines():
            if line.startswith("COPY ") and "--from=" not in line:
                copied.update(line.split()[1:-1])
    require(copied == {rule[1:] for rule in rules[1:]}, f".dockerignore: lets {rules[1:]} in, but {sorted(copied)} are copied")


def check_units():
    units = ["expertd.service", "expertd.socket"]
    if not shutil.which("systemd-analyze"):
        return
    with tempfile.TemporaryDirectory() as folder:
        for unit in units:
            text = sources.read("deploy/" + unit).replace("/usr/local/bin/expertd", "/bin/true")
            with open(os.path.join(folder, unit), "w", encoding="utf-8") as file:
                file.write(text)
        result = run("systemd-analyze", "verify", "--man=no", *(os.path.join(folder, unit) for unit in units))
        problems = [line for line in result.stderr.splitlines() if folder in line or line.startswith("expertd.")]
        require(not problems, "\n".join(problems))


def options():
    """Names of the option table."""
    return set(re.findall(r'^\s*\{"([a-z-]+)", OPTION_', sources.read("server/options.c"), re.M))


def check_option_names():
    known = options()
    require(len(known) > 25, "the option table was not found")
    for name in ("expertd.service", "Dockerfile", "Dockerfile.cuda", "quickstart"):
        text = re.sub(r"^\s*#.*$", "", sources.read("deploy/" + name), flags=re.M)
        used = [option for line in re.findall(r"^(?:ExecStart=|ENTRYPOINT|CMD|command=).*$", text, re.M) for option in re.findall(r"--([a-z-]+)", line)]
        require(used, f"deploy/{name}: no options found")
        for option in used:
            require(option in known, f"deploy/{name}: expertd has no --{option}")


def check_kubernetes():
    try:
        import yaml
    except ImportError:
        print("no PyYAML: manifests are not parsed")
        return
    documents = []
    for name in ("kubernetes.yaml", "prometheus-rules.yaml"):
        documents += [d for d in yaml.safe_load_all(sources.read("deploy/" + name)) if d]
    kinds = {d.get("kind"): d for d in documents}
    for kind in ("Deployment", "Service", "ServiceMonitor"):
        require(kind in kinds, f"kubernetes.yaml: no {kind}")
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        require(probe in container, f"kubernetes.yaml: no {probe}")
    drain = [int(a.split("=")[1]) for a in container["args"] if a.startswith("--drain-timeout-s=")]
    require(drain and pod["terminationGracePeriodSeconds"] > drain[0], "kubernetes.yaml: the grace period must be longer than the drain")
    for argument in container["args"]:
        require(argument.split("=")[0][2:] in options(), f"kubernetes.yaml: expertd has no {argument}")


def check_dashboard():
    dashboard = json.loads(sources.read("deploy/grafana-dashboard.json"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    require(len(ids) == len(set(ids)), "grafana-dashboard.json: two panels have one id")


def check_summary():
    """test_summary.py counts as it says."""
    log = [
        {"name": "mixed", "stdout": "1..3\nok 1 - x\nnot ok 2 - y\nok 3 # SKIP z\n", "result": "FAIL", "command": ["a"]},
        {"name": "crash", "stdout": "1..3\nok 1 - x\n", "result": "FAIL", "command": ["b"]},
        {"name": "short", "stdout": "1..3\nok 1 - x\n", "result": "OK", "command": ["b"]},
        {"name": "skip", "stdout": "", "result": "SKIP", "command": ["c"]},
        {"name": "plain", "stdout": "hello", "result": "OK", "command": ["d"]},
        {"name": "late", "stdout": "1..1\nok 1 - x\n", "result": "TIMEOUT", "command": ["e"]},
    ]
    good = [entry for entry in log if entry["name"] in ("plain", "skip")]
    with tempfile.TemporaryDirectory() as folder:
        for entries, arguments, last, status in (
                (log, [], "5 passed, 4 failed, 2 skipped", 1), (good, [], "1 passed, 0 failed, 1 skipped", 0),
                (good, ["--broken", "2"], "1 passed, 2 failed, 1 skipped", 1), (good[1:], [], "1 passed, 0 failed, 0 skipped", 0),
                (good[:1], [], "0 passed, 0 failed, 1 skipped", 1), ([], [], "0 passed, 1 failed, 0 skipped", 1)):
            path = os.path.join(folder, "testlog.json")
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
            result = run(sys.executable, "deploy/test_summary.py", *arguments, "x=" + path)
            require((result.stdout.splitlines() or [""])[-1] == last, f"test_summary.py: {result.stdout} instead of {last}")
            require(result.returncode == status, f"test_summary.py: exit status {result.returncode} after {last}")


check_scripts()
check_dockerfile("deploy/Dockerfile")
check_dockerfile("deploy/Dockerfile.cuda")
check_dockerignore()
check_units()
check_option_names()
check_kubernetes()
check_dashboard()
check_summary()
sources.finish(faults)

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up meson's test logs: a table by build and suite, then one line `N passed, N failed, N skipped`.

    test_summary.py [--broken N] BUILD=testlog.json...

A program that printed TAP counts by its lines, `# SKIP` as skipped; if it failed without a line saying so (a crash, a timeout, a sanitizer,
lines missing from its plan) that is one failure more. Any other program counts once, by its exit status. `BUILD=skipped` is one skip, a build
in which no test ran and each of N broken builds one failure. Exits 0 only when nothing failed and something passed.
"""
import argparse
import json
import os
import re
import sys

POINT = re.compile(r"^\s*(not )?ok\b\s*(.*)$", re.M)
PLAN = re.compile(r"^\s*1\.\.(\d+)", re.M)


def count_test(test):
    """(passed, failed, skipped) of one entry of the log."""
    good = test["result"] in ("OK", "EXPECTEDFAIL")
    if test["result"] == "SKIP":
        return 0, 0, 1
    output = test.get("stdout") or ""
    points, plan = POINT.findall(output), PLAN.search(output)
    if not plan or not points:
        return int(good), int(not good), 0
    skipped = sum("# skip" in text.lower() for _, text in points)
    failed = sum(bool(bad) and "# skip" not in text.lower() for bad, text in points)
    passed = len(points) - skipped - failed
    if not failed and (not good or len(points) < int(plan.group(1))):
        failed = 1
    return passed, failed, skipped


def read_log(path):
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.strip()]
    except FileNotFoundError:
        return []


def read_suites(log):
    """Suite by command line, which the log leaves out."""
    try:
        with open(os.path.join(os.path.dirname(log), "../meson-info/intro-tests.json"), encoding="utf-8") as file:
            return {tuple(test["cmd"]): ",".join(name.split(":")[-1] for name in test["suite"]) for test in json.load(file)}
    except FileNotFoundError:
        return {}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--broken", type=int, default=0)
    parser.add_argument("builds", nargs="*")
    arguments = parser.parse_args()
    table, bad = {}, []
    for entry in arguments.builds:
        build, path = entry.split("=", 1)
        if path == "skipped":
            table[build, "(sanitizer does not run here)"] = [0, 0, 1, 0.0]
            continue
        tests, suites = read_log(path), read_suites(path)
        if not tests:
            table[build, "(no test ran)"] = [0, 1, 0, 0.0]
        for test in tests:
            suite = suites.get(tuple(test["command"]), "-")
            total = table.setdefault((build, suite), [0, 0, 0, 0.0])
            counts = count_test(test)
            for i in range(3):
                total[i] += counts[i]
            total[3] += test.get("duration") or 0
            if counts[1]:
                bad.append(f"{build}: {test['name'].split(' / ')[-1]}: {test['result']}")
    print(f"{'build':10} {'suite':30} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}")
    for (build, suite), (passed, failed, skipped, seconds) in table.items():
        print(f"{build:10} {suite:30} {passed:7} {failed:7} {skipped:7} {seconds:8.1f}")
    for line in bad:
        print(f"failed: {line}")
    if arguments.broken:
        print(f"failed: {arguments.broken} of the builds")
    passed, failed, skipped = (sum(row[i] for row in table.values()) for i in range(3))
    failed += arguments.broken
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main())

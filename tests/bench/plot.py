#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws how cost grows against the floor, from the lines that `expert-bench kernel --sweep ... --csv FILE` wrote.

    plot.py [--out tests/bench/results] [--note TEXT] FILE...

Writes growth-SHAPE.svg, a panel for each thing that grows. Standard library only. The picture follows the reader's light or dark scheme.
"""
import argparse
import csv
import html
import math
import os

PANEL_W, PANEL_H = 430, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 78, 42, 46
HEAD, FOOT, COLUMNS = 50, 26, 2
STYLE = """
  text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f; }
  .title { font-size: 17px; font-weight: 600; } .panel { font-size: 13px; font-weight: 600; } .quiet { fill: #57606a; }
  .back { fill: #ffffff; } .frame { fill: none; stroke: #8c959f; } .grid { stroke: #d8dee4; } .minor { stroke: #eff2f5; }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round; } .floor { stroke-dasharray: 5 4; stroke-width: 1.6; }
  .c0 { stroke: #0969da; } .c1 { stroke: #bc4c00; } .c2 { stroke: #1a7f37; } .cf { stroke: #6e7781; }
  .name { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round; }
  .t0 { fill: #0969da; } .t1 { fill: #bc4c00; } .t2 { fill: #1a7f37; } .tf { fill: #57606a; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .quiet { fill: #9198a1; } .back { fill: #0d1117; } .frame { stroke: #656c76; }
    .grid { stroke: #2b3138; } .minor { stroke: #1a1f26; }
    .name { stroke: #0d1117; }
    .c0 { stroke: #58a6ff; } .c1 { stroke: #f0883e; } .c2 { stroke: #3fb950; } .cf { stroke: #8b949e; }
    .t0 { fill: #58a6ff; } .t1 { fill: #f0883e; } .t2 { fill: #3fb950; } .tf { fill: #9198a1; }
  }
"""


class Curve:
    def __init__(self, label, style, points, floor=False):
        self.label, self.style, self.points, self.floor = label, style, sorted(points), floor


def label_of(value):
    return f"{value / 1000:g}k" if value >= 1000 and value % 1000 == 0 else f"{value:g}"


def decades(low, high):
    """Lines at 1, 2 and 5, or closer where that gives few; labels at all of them, or at powers of ten where that gives many."""
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        lines = [m * 10.0**e for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1) for m in steps]
        lines = [v for v in lines if low <= v <= high]
        if len(lines) > 2:
            break
    return [(v, len(lines) <= 8 or math.log10(v) % 1 == 0) for v in lines]


class Panel:
    def __init__(self, title, x_title, curves, ticks=None, linear=False):
        self.title, self.x_title, self.curves, self.linear = title, x_title, [c for c in curves if c.points], linear
        self.ticks = ticks

    def svg(self, x0, y0):
        xs = [x for c in self.curves for x, _ in c.points]
        ys = [y for c in self.curves for _, y in c.points]
        x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys) / 1.25, max(ys) * 1.25
        left, right, top, bottom = x0 + LEFT, x0 + PANEL_W - RIGHT, y0 + TOP, y0 + PANEL_H - BOTTOM

        def place(v, low, high, a, b):
            return a + (b - a) * ((v - low) / (high - low) if high > low else 0.5)

        def at_x(v):
            return place(v, x_low, x_high, left, right) if self.linear else place(math.log(v), math.log(x_low), math.log(x_high), left, right)

        def at_y(v):
            return place(math.log(v), math.log(y_low), math.log(y_high), bottom, top)

        out = [f'<text class="panel" x="{left}" y="{y0 + 22}">{html.escape(self.title)}</text>',
               f'<text class="quiet" x="{left}" y="{y0 + 37}">µs</text>',
               f'<text class="quiet" x="{(left + right) / 2:.1f}" y="{bottom + 36}" text-anchor="middle">{html.escape(self.x_title)}</text>']
        for v, named in decades(y_low, y_high):
            y = at_y(v)
            out.append(f'<line class="{"grid" if named else "minor"}" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            if named:
                out.append(f'<text class="quiet" x="{left - 7}" y="{y + 4:.1f}" text-anchor="end">{label_of(v)}</text>')
        for v, name in self.ticks or [(v, label_of(v)) for v in sorted(set(xs))]:
            if x_low <= v <= x_high:
                x = at_x(v)
                out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>')
                out.append(f'<text class="quiet" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{name}</text>')
        out.append(f'<rect class="frame" x="{left}" y="{top}" width="{right - left}" height="{bottom - top}"/>')
        names = []
        for c in self.curves:
            path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in c.points)
            out.append(f'<polyline class="line c{c.style}{" floor" if c.floor else ""}" points="{path}"/>')
            if len(c.points) < 20 and not c.floor:
                out += [f'<circle class="t{c.style}" cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.6"/>' for x, y in c.points]
            names.append([at_y(c.points[-1][1]) + 4, at_x(c.points[-1][0]) + 6, c])
        # Names at the ends of lines, moved apart where they would overlap; lines that end early have theirs where they end.
        names.sort(key=lambda n: n[0])
        for i in range(1, len(names)):
            names[i][0] = max(names[i][0], names[i - 1][0] + 14)
        over = names[-1][0] - (bottom + 4) if names else 0
        for i in range(len(names) - 1, -1, -1):
            if over > 0:
                names[i][0] = min(names[i][0], bottom + 4 - 14 * (len(names) - 1 - i))
        for y, x, c in names:
            out.append(f'<text class="name t{c.style}" x="{x:.1f}" y="{y:.1f}">{html.escape(c.label)}</text>')
        return "\n".join(out)


def number(line, key):
    return float(line[key])


def rows_panels(lines):
    panels = []
    ticks = [(4**i, label_of(4**i)) for i in range(8)]
    for adapters in sorted({int(line["adapters"]) for line in lines}):
        mine = [line for line in lines if int(line["adapters"]) == adapters]
        curves = [Curve("floor", "f", {(number(line, "rows"), number(line, "floor_us")) for line in mine}, True)]
        curves += [Curve(path, style, [(number(line, "rows"), number(line, "time_us")) for line in mine if line["path"] == path])
                   for style, path in enumerate(("decode", "prefill"))]
        rank = max(line["rank"] for line in mine)
        panels.append(Panel("Rows, no adapters" if not adapters else f"Rows, each with one of {adapters} adapters of rank {rank}", "rows T", curves, ticks))
    return panels


def fixed_panel(lines, title, x_title, key, linear=False, zero=None):
    curves, ticks = [], None
    for style, rows in enumerate(sorted({int(line["rows"]) for line in lines})[:3]):
        mine = [line for line in lines if int(line["rows"]) == rows]

        def x(line):
            return zero if zero and number(line, key) == 0 else number(line, key)

        curves.append(Curve(f"T = {rows}", style, [(x(line), number(line, "time_us")) for line in mine]))
        curves.append(Curve("floor", style, [(x(line), number(line, "floor_us")) for line in mine], True))
    if zero:
        ticks = [(zero if v == 0 else v, label_of(v)) for v in sorted({number(line, key) for line in lines})]
    elif key == "touched":
        high = max(number(line, key) for line in lines)
        ticks = [(2**i, label_of(2**i)) for i in range(1, 11) if 2**i <= high]
    return Panel(title, x_title, curves, ticks, linear)


def panels_of(lines):
    by = {}
    for line in lines:
        by.setdefault(line["run"], []).append(line)
    panels = rows_panels(by["sweep-rows"]) if "sweep-rows" in by else []
    if "sweep-experts" in by:
        panels.append(fixed_panel(by["sweep-experts"], "Experts touched, no adapters", "experts touched", "touched"))
    if "sweep-adapters" in by:
        rank = max(line["rank"] for line in by["sweep-adapters"])
        panels.append(fixed_panel(by["sweep-adapters"], f"Adapters in the batch, of 64, rank {rank}", "adapters that rows draw from", "adapters", zero=0.5))
    if "sweep-rank" in by:
        panels.append(fixed_panel(by["sweep-rank"], "Rank, 8 adapters", "rank", "rank"))
    for adapters in sorted({line["adapters"] for line in by.get("sweep-skew", [])}, key=int):
        mine = [line for line in by["sweep-skew"] if line["adapters"] == adapters]
        title = "One expert's share, " + ("no adapters" if adapters == "0" else f"{adapters} adapters of rank {mine[0]['rank']}")
        panels.append(fixed_panel(mine, title, "share of the slots that go to one expert", "skew", linear=True))
    return panels


def draw(shape, lines, note):
    panels = panels_of(lines)
    count = (len(panels) + COLUMNS - 1) // COLUMNS
    width, height = COLUMNS * PANEL_W, HEAD + count * PANEL_H + FOOT
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
             "<!-- SPDX-License-Identifier: Apache-2.0 -->", f"<title>{html.escape(shape)}: cost against the floor</title>", f"<style>{STYLE}</style>",
             f'<rect class="back" width="{width}" height="{height}"/>',
             f'<text class="title" x="{LEFT}" y="32">{html.escape(shape)}: one forward against its floor</text>']
    parts += [panel.svg(i % COLUMNS * PANEL_W, HEAD + i // COLUMNS * PANEL_H) for i, panel in enumerate(panels)]
    parts += [f'<text class="quiet" x="{LEFT}" y="{height - 10}">Dashed: the floor, drawn from memory bandwidth and dense rate. {html.escape(note)}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+")
    p.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "results"))
    p.add_argument("--note", default="", help="stands below: hardware, date")
    options = p.parse_args()
    lines = []
    for path in options.files:
        with open(path, newline="", encoding="utf-8") as file:
            lines += [line for line in csv.DictReader(file) if line["run"].startswith("sweep-") and None not in line.values()]
    for shape in sorted({line["shape"] for line in lines}):
        path = os.path.join(options.out, f"growth-{shape}.svg")
        with open(path, "w", encoding="utf-8") as file:
            file.write(draw(shape, [line for line in lines if line["shape"] == shape], options.note))
        print(path)


if __name__ == "__main__":
    main()

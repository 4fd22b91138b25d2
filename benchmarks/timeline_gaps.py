"""What did the devices wait for? Reads a timeline that `roundpipe.trace` wrote.

    python benchmarks/timeline_gaps.py timeline.json --gaps 10

For each device: the share of the time in which its layers computed, and the longest gaps between two of them, with what
the threads of the host did meanwhile: milliseconds of each kind of span inside the gap.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

LAYER_KINDS = ("fwd", "re", "bwd")


class Gap(NamedTuple):
    begin_ms: float
    end_ms: float
    before: str
    after: str


def gaps_of(layers: list[dict[str, Any]]) -> tuple[float, list[Gap]]:
    """(share of the time that is covered, gaps) of one device's layers."""
    layers = sorted(layers, key=lambda e: e["ts"])
    covered, gaps, last = 0.0, [], layers[0]
    end = last["ts"]
    for event in layers:
        stop = event["ts"] + event["dur"]
        if event["ts"] > end:
            gaps.append(Gap(end / 1e3, event["ts"] / 1e3, last["name"], event["name"]))
        covered += max(0.0, stop - max(end, event["ts"]))
        if stop > end:
            end, last = stop, event
    return covered / max(1e-9, end - layers[0]["ts"]), gaps


def meanwhile(gap: Gap, host: list[dict[str, Any]], names: dict[Any, str]) -> dict[str, float]:
    """Milliseconds of each span of the host inside the gap, by thread and name."""
    found: defaultdict[str, float] = defaultdict(float)
    for event in host:
        begin, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
        inside = min(end, gap.end_ms) - max(begin, gap.begin_ms)
        if inside > 0:
            found[f"{names.get(event['tid'], event['tid'])}: {event['name']}"] += inside
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timeline", type=Path)
    parser.add_argument("--gaps", type=int, default=8, help="how many of each device to show")
    args = parser.parse_args()
    events = json.loads(args.timeline.read_text())["traceEvents"]
    names = {
        e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] != 1
    }
    devices = {
        e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == 1
    }
    spans = [e for e in events if e["ph"] == "X"]
    host = [e for e in spans if e["cat"] not in (*LAYER_KINDS, "call", "job")]
    if not devices:
        print("no layer computed while the timeline was recorded", file=sys.stderr)
        return 1
    for tid, device in devices.items():
        share, gaps = gaps_of([e for e in spans if e["pid"] == 1 and e["tid"] == tid])
        total = sum(gap.end_ms - gap.begin_ms for gap in gaps)
        print(f"{device}: layers computed {share:.1%} of the time; {len(gaps)} gaps of {total:.1f} ms together")
        for gap in sorted(gaps, key=lambda g: g.begin_ms - g.end_ms)[: args.gaps]:
            print(f"  {gap.end_ms - gap.begin_ms:8.2f} ms between {gap.before} and {gap.after}")
            for what, ms in list(meanwhile(gap, host, names).items())[:6]:
                print(f"      {ms:8.2f} ms {what}")
    copies = [e for e in spans if e["cat"] == "copy"]
    for lane in sorted({e["name"] for e in copies}):
        mine = [e for e in copies if e["name"] == lane]
        gigabytes, ms = sum(e["args"]["bytes"] for e in mine) / 1e9, sum(e["dur"] for e in mine) / 1e3
        print(f"{lane}: {gigabytes:.2f} GB in {ms:.1f} ms, {gigabytes / max(ms, 1e-6) * 1e3:.1f} GB/s")
    updates = sum(e["dur"] for e in spans if e["cat"] == "update") / 1e3
    print(f"updates: {updates:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())

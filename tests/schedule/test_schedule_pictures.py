"""Pictures of one small timeline."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from dataclasses import replace

import pytest

from roundpipe_cli.schedule.builders import build_schedule
from roundpipe_cli.schedule.dealing import Rounds
from roundpipe_cli.schedule.durations import equal_costs
from roundpipe_cli.schedule.pictures import chrome_trace, svg_picture
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import Timeline


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Two blocks and a head: F 1, R 1, B 2, head F 1 B 2; weights take 0.5 per layer to upload."""
    costs = equal_costs(3)
    layers = tuple(replace(layer, param_bytes=1, grad_bytes=1, optimizer_s=0.25) for layer in costs.layers)
    costs = replace(costs, layers=layers, link_bytes_per_s=2.0)
    schedule = build_schedule("gpipe", forward_stages=[(0, 0), (1, 2)], num_workers=2, rounds=Rounds(1))
    return simulate(schedule, costs)


def test_svg_has_a_row_per_timeline_and_a_box_per_action(timeline: Timeline) -> None:
    root = xml.etree.ElementTree.fromstring(svg_picture([("one <&>", timeline), ("two", timeline)]))
    space = "{http://www.w3.org/2000/svg}"
    assert [element.text for element in root.iter(f"{space}title")] == ["0F0", "1R0", "1B0", "1F0", "0R0", "0B0"] * 2
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts.count("worker 1") == 2
    assert "one <&>" in texts


def test_trace_opens_in_perfetto(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(timeline.intervals)
    first = next(event for event in spans if event["name"] == "0F0")
    assert (first["pid"], first["tid"], first["ts"], first["dur"]) == (1, 0, 0.5e6, 1e6)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"host", "worker 0", "worker 1", "compute", "host to device", "device to host", "optimizer"}
    assert {"weights up", "weight gradients down", "update of layer 2"} <= {event["name"] for event in spans}

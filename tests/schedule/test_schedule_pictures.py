"""Pictures of one small timeline."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from dataclasses import replace

import pytest

from roundpipe_cli.schedule.actions import equal_costs
from roundpipe_cli.schedule.builders import Rounds, build_schedule
from roundpipe_cli.schedule.pictures import chrome_trace, svg_picture
from roundpipe_cli.schedule.simulate import simulate
from roundpipe_cli.schedule.timeline import Timeline, bubble_ratio
from roundpipe_cli.units import round_step


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    """Two blocks and a head: F 1, R 1, B 2, head F 1 B 2; weights take 0.5 per layer to upload."""
    costs = equal_costs(3)
    layers = tuple(replace(layer, param_bytes=1, grad_bytes=1, optimizer_s=0.25) for layer in costs.layers)
    costs = replace(costs, layers=layers, link_bytes_per_s=2.0)
    schedule = build_schedule("gpipe", forward_stages=[(0, 0), (1, 2)], num_workers=2, rounds=Rounds(1))
    return simulate(schedule, costs)


SVG = "{http://www.w3.org/2000/svg}"


def test_svg_has_a_row_per_timeline_and_a_box_per_action(timeline: Timeline) -> None:
    """Marks had white strokes that hid the narrow ones; there was no axis, no unit, no word that it is simulated."""
    text = svg_picture([("one <&>", timeline), ("two", timeline)], heading="a model on <8x4090>", note="simulated")
    root = xml.etree.ElementTree.fromstring(text)
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.attrib.get("class", "").startswith("kind-") and len(bar)]
    assert [bar[0].text for bar in bars] == ["0F0", "1R0", "1B0", "1F0", "0R0", "0B0"] * 2
    assert not any("stroke" in bar.attrib for bar in root.iter(f"{SVG}rect"))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts.count("worker 1") == 2
    assert {"one <&>", "a model on <8x4090>", "simulated", "recompute", "0 s", "10 s"} <= set(texts)
    assert "prefers-color-scheme: dark" in text and not any("busy" in str(shown) for shown in texts)


def test_a_picture_of_one_step_says_how_busy_the_workers_are(timeline: Timeline) -> None:
    text = svg_picture([("one", timeline)], heading="a", note="simulated")
    busy = f"workers {100 * (1 - bubble_ratio(timeline)):.0f} % busy"
    assert busy in [element.text for element in xml.etree.ElementTree.fromstring(text).iter(f"{SVG}text")]


def test_ticks_are_round() -> None:
    assert [round_step(length, 6) for length in (1.0, 7.0, 31.0, 0.0042)] == [0.2, 2.0, 10.0, 0.001]


def test_trace_opens_in_perfetto(timeline: Timeline) -> None:
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(timeline.intervals)
    first = next(event for event in spans if event["name"] == "0F0")
    assert (first["pid"], first["tid"], first["ts"], first["dur"]) == (1, 0, 0.5e6, 1e6)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {"host", "worker 0", "worker 1", "compute", "host to device", "device to host", "optimizer"}
    assert {"weights up", "weight gradients down", "update of layer 2"} <= {event["name"] for event in spans}


@pytest.mark.parametrize("schedule", ["roundpipe", "gpipe"])
def test_forward_is_seen_inside_the_stage_of_the_loss(schedule: str) -> None:
    """Roundpipe computes the last layers' forward there, once; it was drawn as backward alone."""
    fused = schedule == "roundpipe"
    stages = {"forward_stages": [(0, 1)], "backward_stages": [(2, 2), (0, 1)]} if fused else {}
    stages = stages or {"forward_stages": [(0, 0), (1, 2)]}
    timeline = simulate(build_schedule(schedule, **stages, num_workers=2, rounds=Rounds(1)), equal_costs(3))
    text = svg_picture([(schedule, timeline)], heading="a", note="simulated")
    assert text.count('class="kind-H"') == (2 if fused else 0), "one action and the legend"
    assert ("forward and backward" in text) == fused and ("linearGradient" in text) == fused

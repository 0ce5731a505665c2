"""Pictures: every task is in them, the same input gives the same bytes, and errors are clear."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dash_attn.errors import DashError
from dash_attn.model import H200, Costs, Timeline, simulate, timeline_chart
from dash_attn.model.output import require_writable
from dash_attn.model.pixels import pixels, shares
from dash_attn.model.render import (
    PAPER_COSTS,
    PictureError,
    PlotsMissingError,
    save_gantt,
    save_plan,
    text_gantt,
    text_plan,
)
from dash_attn.model.segments import Segments
from dash_attn.problem import Mask, Problem
from dash_attn.schedule import FA3, POLICIES, Descending, Plan, Policy, Shift, SymmetricShift, build_plan
from dash_attn.schedule.graph import ChainGraph, Edge

SVG = "{http://www.w3.org/2000/svg}"
CASES = [
    (FA3(), Mask.full(), 2, 1, PAPER_COSTS, 2),
    (Descending(), Mask.causal(), 5, 3, PAPER_COSTS, 4),
    (SymmetricShift(), Mask.causal(), 6, 2, H200, 6),
    (Shift(), Mask.full(), 4, 2, Costs(3, 1, latency=2, dq_buffers=2), 4),
]


def make_plan(policy: Policy, mask: Mask, n: int, heads: int, kv_heads: int | None = None) -> Plan:
    problem = Problem.dense(heads=heads, kv_heads=kv_heads, seqlen=128 * n, head_dim=64, mask=mask)
    return build_plan(problem, policy)


def make_timeline(policy: Policy, mask: Mask, n: int, heads: int, costs: Costs, workers: int) -> Timeline:
    return simulate(make_plan(policy, mask, n, heads), costs, workers)


def boxes(svg: Path, kind: str) -> dict[str, int]:
    """Closed polygons in the paths of each group ``kind-PANEL-COLOUR``."""
    found = {}
    for group in ET.parse(svg).iter(f"{SVG}g"):
        name = group.get("id", "")
        if name.startswith(f"{kind}-"):
            found[name] = sum(path.get("d", "").count("z") for path in group.iter(f"{SVG}path"))
    return found


# Text


def test_text_gantt_shows_waits_and_idle_exactly() -> None:
    timeline = make_timeline(FA3(), Mask.causal(), 3, 1, PAPER_COSTS, 3)
    assert text_gantt(timeline).splitlines() == [
        "0 |00+00+00+  |",
        "1 |00....+00+ |",
        "2 |00........+|",
        "makespan 11, 1 cycle per character; compute: kv head 0, reduce +, wait ., idle blank",
    ]


def test_text_gantt_shows_launches_and_compute_over_reductions() -> None:
    timeline = make_timeline(Shift(), Mask.full(), 2, 1, Costs(4, 2, dq_buffers=1, launch=3), 2)
    chart = text_gantt(timeline).splitlines()
    assert chart[:2] == ["0 |^^^00000000++|", "1 |^^^00000000++|"]
    assert chart[2].endswith("launch ^")


@pytest.mark.parametrize("width", [5, 20, 60, 100])
def test_text_gantt_keeps_the_width(width: int) -> None:
    timeline = make_timeline(Descending(), Mask.causal(), 12, 11, H200, 12)
    chart = text_gantt(timeline, width).splitlines()[:-1]
    assert {len(line) for line in chart} == {max(width, 6)}
    assert len(chart) == 12


def test_text_gantt_of_times_below_a_cycle() -> None:
    timeline = make_timeline(Shift(), Mask.full(), 2, 1, Costs(0.25, 0.25), 2)
    assert text_gantt(timeline, 12).splitlines()[0] == "0 |00++00++|"


def test_text_plan_of_each_corner_of_a_mask() -> None:
    window = Problem.dense(seqlen_q=256, seqlen_k=512, head_dim=64, mask=Mask.window(100, 0))
    assert text_plan(build_plan(window, FA3())).splitlines() == [
        "q\\kv   0   1   2   3",
        "   0   . 0:0 0:1   .",
        "   1   .   . 1:0 0:1",
    ]


def test_text_plan_takes_the_sequence_asked_for() -> None:
    plan = build_plan(Problem.varlen([128, 256, (128, 0)], heads=1, head_dim=64), Descending())
    assert [len(text_plan(plan, s).splitlines()) for s in range(3)] == [2, 3, 2]
    assert text_plan(plan, 1).splitlines()[1] == "   0 1:0 1:1"
    assert text_plan(plan, 2).splitlines()[1] == "   0"


def test_text_plan_of_many_tiles_is_abridged() -> None:
    plan = make_plan(FA3(), Mask.causal(), 9, 1)
    whole, part = text_plan(plan).splitlines(), text_plan(plan, most=4).splitlines()
    assert len(whole) == 10
    assert part[:5] == [line[: len(part[0])] for line in whole[:5]]
    assert part[5:] == ["the first 4 of 9 q tiles, 4 of 9 kv tiles"]
    assert len(text_plan(make_plan(FA3(), Mask.full(), 300, 1)).splitlines()) == 66


def test_text_gantt_of_many_workers_is_abridged() -> None:
    timeline = make_timeline(FA3(), Mask.causal(), 9, 1, PAPER_COSTS, 9)
    whole, part = text_gantt(timeline).splitlines(), text_gantt(timeline, most=4).splitlines()
    assert part == [*whole[:4], "… and 5 more workers", whole[-1]]
    many = make_timeline(FA3(), Mask.full(), 100, 1, PAPER_COSTS, 100)
    assert len(text_gantt(many).splitlines()) == 66


# Charts


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_svg_has_two_boxes_for_every_task(
    case: tuple[Policy, Mask, int, int, Costs, int], tmp_path: Path
) -> None:
    timeline = make_timeline(*case)
    path = save_gantt(timeline, tmp_path / "a.svg")
    p = timeline.plan.problem
    for kind in ("compute", "reduce"):
        assert boxes(path, kind) == {f"{kind}-0-{head}": p.tasks // p.heads for head in range(p.heads)}


def test_svg_labels_every_task_with_its_q_tile(tmp_path: Path) -> None:
    timeline = make_timeline(FA3(), Mask.full(), 2, 1, PAPER_COSTS, 2)
    texts = [e.text for e in ET.parse(save_gantt(timeline, tmp_path / "a.svg", title="T")).iter(f"{SVG}text")]
    ticks = [*map(str, range(8)), "0", "1"]
    assert sorted(t for t in texts if t and t.isdigit()) == sorted([*ticks, "0", "0", "1", "1"])
    assert "T" in texts


def test_stacked_panels_hold_their_own_tasks(tmp_path: Path) -> None:
    plans = [make_plan(p, Mask.causal(), 4, 2) for p in (FA3(), SymmetricShift())]
    panels = [(plan.policy, simulate(plan, PAPER_COSTS, 4)) for plan in plans]
    path = save_gantt(panels, tmp_path / "a.svg", title="two")
    assert boxes(path, "compute") == {f"compute-{panel}-{head}": 10 for panel in (0, 1) for head in (0, 1)}


def test_group_of_q_heads_stays_in_one_colour(tmp_path: Path) -> None:
    plan = make_plan(FA3(), Mask.full(), 2, 4, kv_heads=2)
    path = save_gantt(simulate(plan, PAPER_COSTS, 2), tmp_path / "a.svg")
    assert boxes(path, "compute") == {"compute-0-0": 8, "compute-0-1": 8}


def test_colours_come_again_after_eight_heads(tmp_path: Path) -> None:
    path = save_gantt(make_timeline(FA3(), Mask.full(), 2, 10, PAPER_COSTS, 2), tmp_path / "a.svg")
    assert boxes(path, "compute") == {f"compute-0-{c}": 8 if c < 2 else 4 for c in range(8)}
    assert "heads 0, 8, …" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_same_timeline_same_bytes(suffix: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        save_gantt(make_timeline(*CASES[1]), file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_bytes_ignore_the_users_style(tmp_path: Path) -> None:
    import matplotlib

    plain = save_gantt(make_timeline(*CASES[0]), tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.fonttype": "path"}):
        styled = save_gantt(make_timeline(*CASES[0]), tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 20
    assert plain.read_bytes() == styled.read_bytes()


def test_png_is_a_png(tmp_path: Path) -> None:
    assert save_gantt(make_timeline(*CASES[0]), tmp_path / "a.PNG").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_many_tasks_become_pixels_in_a_light_svg(tmp_path: Path) -> None:
    timeline = make_timeline(Descending(), Mask.causal(), 24, 8, H200, 100)
    path = save_gantt(timeline, tmp_path / "a.svg")
    assert len(list(ET.parse(path).iter(f"{SVG}image"))) == 1
    assert path.stat().st_size < 150_000


def test_more_tasks_become_one_image_of_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_chart, "_PIXELS_ABOVE", 100)
    monkeypatch.setattr(timeline_chart, "_add_boxes", None)  # a box per task would take too long
    for n, costs in ((24, H200), (11, Costs(0, 0))):
        timeline = make_timeline(Descending(), Mask.causal(), n, 4, costs, 20)
        path = save_gantt([("one", timeline), ("two", timeline)], tmp_path / "a.svg")
        names = [e.get("id", "") for e in ET.parse(path).iter(f"{SVG}image")]
        assert len(names) == 2
        assert boxes(path, "compute") == {}
        assert path.stat().st_size < 150_000


@pytest.mark.parametrize(("workers", "rows"), [(1, 1), (7, 7), (7, 4), (7, 2), (7, 1)])
def test_shares_are_the_time_covered_in_each_pixel(workers: int, rows: int) -> None:
    rng = np.random.default_rng(workers * rows)
    columns, span, per_row = 9, 40.0, -(-workers // rows)
    rows = -(-workers // per_row)
    worker = np.repeat(np.arange(workers), 6)
    times = np.sort(rng.uniform(0, span, (workers, 12)), axis=1)
    times[0, 0], times[0, -1] = 0.0, span
    start, end = times[:, ::2].ravel(), times[:, 1::2].ravel()
    edges = np.linspace(0, span, columns + 1)
    expected = np.zeros((rows, columns))
    for row in range(rows):
        members = range(row * per_row, min((row + 1) * per_row, workers))
        for k in np.flatnonzero(np.isin(worker, members)):
            overlap = np.minimum(end[k], edges[1:]) - np.maximum(start[k], edges[:-1])
            expected[row] += np.maximum(overlap, 0) / (span / columns) / len(members)
    found = shares(Segments(worker, start, end), workers, span, rows, columns)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_pixels_mix_colours_by_time() -> None:
    one = np.array([0])
    half = Segments(one, np.array([0.0]), np.array([50.0]))
    whole = Segments(one, np.array([0.0]), np.array([75.0]))
    image = pixels([(half, "#FF0000"), (whole, "#0000FF")], 1, 100.0, "#FFFFFF")
    columns = image.shape[1]
    assert image.shape == (1, columns, 3)
    expected = [(255, 0, 0)] * (columns // 2) + [(0, 0, 255)] * (columns // 4)
    assert image[0].tolist() == [list(c) for c in [*expected, *[(255, 255, 255)] * (columns // 4)]]
    assert pixels([(whole, "#000000")], 1000, 100.0, "#FFFFFF").shape[0] <= 400


def test_svg_just_below_the_pixel_limit_is_light(tmp_path: Path) -> None:
    path = save_gantt(make_timeline(Shift(), Mask.full(), 14, 4, PAPER_COSTS, 14), tmp_path / "a.svg")
    assert sum(boxes(path, "compute").values()) == 784
    assert path.stat().st_size < 150_000


def test_svg_has_text_a_white_ground_and_no_date(tmp_path: Path) -> None:
    svg = save_gantt(make_timeline(*CASES[0]), tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "<text" in svg
    assert "#ffffff" in svg
    assert not re.search(r"dc:date|\d{4}-\d\d-\d\d", svg)


@pytest.mark.parametrize("name", ["chart.pdf", "chart", "chart.svg.gz"])
def test_other_suffix_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(name))) as caught:
        save_gantt(make_timeline(*CASES[0]), tmp_path / name)
    assert isinstance(caught.value, PictureError)
    assert not list(tmp_path.iterdir())


def test_no_timeline_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="at least one timeline"):
        save_gantt([], tmp_path / "a.svg")


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dash_attn.model.figures import draw_figures

    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    timeline = make_timeline(*CASES[0])
    for draw in (
        lambda: save_gantt(timeline, tmp_path / "a.svg"),
        lambda: save_plan(timeline.plan, tmp_path / "a.svg"),
        lambda: draw_figures(tmp_path),
    ):
        with pytest.raises(PlotsMissingError, match=re.escape("pip install 'dash-attn[plots]'")) as caught:
            draw()
        assert isinstance(caught.value, ImportError)
        assert isinstance(caught.value, DashError)
    assert text_gantt(timeline)


# Plans


@pytest.mark.parametrize("name", POLICIES)
def test_save_plan_of_every_policy(name: str, tmp_path: Path) -> None:
    mask = Mask.full() if name == "shift" else Mask.causal()
    plan = make_plan(POLICIES[name](), mask, 4, 2)
    path = save_plan(plan, tmp_path / "plan.svg")
    assert sum(boxes(path, "compute").values()) == plan.problem.tasks
    text = path.read_text(encoding="utf-8")
    assert "on 4 workers" in text
    assert "c = 2, r = 1 in series" in text


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        (name, lengths)
        for name in POLICIES
        for lengths in ((128, 0), (0, 128), (0, 0))
        if name != "symmetric_shift" or lengths[0] == lengths[1]
    ],
)
def test_save_plan_without_tasks(name: str, lengths: tuple[int, int], tmp_path: Path) -> None:
    mask = Mask.full() if name == "shift" else Mask.causal()
    problem = Problem.dense(heads=2, seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=64, mask=mask)
    plan = build_plan(problem, POLICIES[name]())
    path = save_plan(plan, tmp_path / "plan.svg")
    assert boxes(path, "compute") == {}
    assert "no tasks" in path.read_text(encoding="utf-8")
    assert "makespan 0" in text_gantt(simulate(plan, PAPER_COSTS, max(1, plan.min_workers)))
    assert text_plan(plan).startswith("q\\kv")


def test_save_plan_with_empty_items_among_others(tmp_path: Path) -> None:
    problem = Problem.dense(seqlen_q=128, seqlen_k=512, head_dim=64, mask=Mask.window(0, 0))
    plan = build_plan(problem, FA3())
    assert sum(boxes(save_plan(plan, tmp_path / "a.svg"), "compute").values()) == plan.problem.tasks
    assert len(plan.items) > plan.problem.tasks


def test_a_target_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    target = tmp_path / "a.svg"
    assert require_writable(target) == target
    assert not list(tmp_path.iterdir())
    target.write_bytes(b"1234")
    assert require_writable(target) == target
    assert target.read_bytes() == b"1234"


# The paper's figures


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from dash_attn.model.figures import draw_figures

    return draw_figures(tmp_path_factory.mktemp("figures") / "new" / "folder")


def test_figures_are_six_light_files_with_the_same_bytes_each_time(
    figures: list[Path], tmp_path: Path
) -> None:
    from dash_attn.model.figures import draw_figures

    assert [path.name for path in figures] == [f"fig{number}.svg" for number in range(2, 8)]
    for one, other in zip(figures, draw_figures(tmp_path), strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert one.stat().st_size < 150_000
        ET.parse(one)


def test_figures_hold_their_tasks_and_say_what_was_simulated(figures: list[Path]) -> None:
    by_name = {path.stem: path for path in figures}
    tasks = {name: sum(boxes(path, "compute").values()) for name, path in by_name.items()}
    assert tasks == {"fig2": 4, "fig3": 52, "fig4": 20, "fig5": 0, "fig6": 32, "fig7": 72}
    for name, makespan in (("fig2", 7), ("fig3", 27), ("fig4", 18), ("fig6", 24), ("fig7", 27)):
        text = by_name[name].read_text(encoding="utf-8")
        assert re.search(rf"makespan {makespan} simulated; paper: .* = {makespan}<", text), name
    assert "critical path 11, without them 9" in by_name["fig5"].read_text(encoding="utf-8")


def test_figures_as_png_and_wrong_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dash_attn.model import figures

    monkeypatch.setattr(figures, "_FIGURES", {"fig2": figures.figure_2})
    assert [path.name for path in figures.draw_figures(tmp_path, ("svg", "png"))] == ["fig2.svg", "fig2.png"]
    with pytest.raises(PictureError, match="'pdf'"):
        figures.draw_figures(tmp_path, ("pdf",))


@pytest.mark.parametrize("seed", range(20))
def test_critical_nodes_add_up_to_the_critical_path(seed: int) -> None:
    from dash_attn.model.graph_chart import critical_nodes

    rng = np.random.default_rng(seed)
    chains = tuple(tuple(rng.integers(1, 5, 6).astype(float).tolist()) for _ in range(3))
    # Edges from lower to higher chains cannot close a cycle.
    edges = tuple(
        Edge((low, int(rng.integers(1, 7))), (high, int(rng.integers(1, 7))))
        for low, high in ((0, 1), (0, 2), (1, 2))
    )
    graph = ChainGraph(chains, edges)
    nodes = critical_nodes(graph)
    length = 0.0
    for (k, d), (k2, d2) in pairwise(nodes):
        if k == k2 and d2 == d + 1:
            length += chains[k][d]
        else:
            assert Edge((k, d), (k2, d2)) in edges
    assert nodes[0][1] == 0
    assert length == graph.critical_path()

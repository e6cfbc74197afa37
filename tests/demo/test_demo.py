"""`symcomm demo`: what it shows is what happened, and its parts do what they say."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from symcomm.bench import model as demo_model
from symcomm.cli import demo
from symcomm.demo import plot as demo_plot
from symcomm.demo import train as demo_train
from tests.support import loaded

torch = pytest.importorskip("torch", reason="the demo trains a model")

pytestmark = pytest.mark.long
SMALLER = """
import dataclasses
from symcomm.cli import demo
demo.WRITING = dataclasses.replace(demo.WRITING, layers=1, width=256)
demo.app()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)  # 17 processes that load torch
def test_the_whole_demo(tmp_path: Path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "losses.svg"
    done = loaded.run(
        [sys.executable, "-c", SMALLER, "--steps", "12", "--picture", str(picture)],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},  # wider than a demo gets
        timeout=235,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"3 +│ \[30\.0, 31\.0, 32\.0, 33\.0\] +│ \[60\.0, 64\.0, 68\.0, 72\.0\]", done.stdout), done.stdout
    plain = " ".join(done.stdout.split())
    assert "The losses of all 12 steps are the same, bit for bit" in plain
    for backend in ("symcomm", "gloo"):
        assert re.search(rf"^{backend} .* 12/12 +\d\.\d+ +\d+ +\d+\.\d% +done$", done.stdout, re.M), done.stdout
    assert "<svg" in picture.read_text()
    assert "RankFailedError: all_reduce #2 on group 'world'" in plain
    assert "CollectiveMismatchError: all_reduce #1 on group 'world'" in plain
    *lines, last = done.stdout.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert last == f"Picture of both trainings: {picture}"  # a path is not broken
    speeds = r"two ranks, symcomm +\d+ tokens/s two ranks, gloo +\d+ tokens/s one process +\d+ tokens/s .*Next: .*\.$"
    assert re.search(speeds, " ".join(" ".join(lines).split())), done.stdout


def test_refusals(tmp_path: Path):
    for arguments, words in (
        (["--steps", "0"], "--steps must be 1 or more, got 0"),
        (["--picture", "figure.doc"], "ends in .png or .svg"),
        (["--picture", str(tmp_path / "nowhere" / "figure.svg")], "in a folder that exists"),
        (["--picture", "/proc/figure.svg"], "must be a file in a folder that can be written, got '/proc/figure.svg'"),
    ):
        result = CliRunner().invoke(demo.app, arguments)
        assert result.exit_code == 2 and words in result.output and result.output.count("\n") == 1, result.output


def test_the_text_is_this_package():
    text = demo_model.own_source().decode("ascii")
    assert "def own_source() -> bytes:" in text and len(text) > 100_000


def test_a_character_does_not_see_later_ones():
    torch.manual_seed(0)
    model = demo_model.decoder(16, 2, 8)
    text = torch.randint(demo_model.SYMBOLS, (1, 8))
    before = model(text)
    text[0, 5] += 1
    text[0, 5] %= demo_model.SYMBOLS
    changed = (model(text) - before).abs().amax(dim=(0, 2)) > 1e-6
    assert changed.tolist() == [False] * 5 + [True] * 3


def test_the_model_learns_and_writes():
    torch.manual_seed(0)
    model = demo_model.decoder(32, 1, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.tensor([list(b"abcdabcda")])
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1])[0], text[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert demo_model.sample(model, "ab", 10) == "abcdabcdabcd"


def test_the_share_of_communication():
    clock = demo_train.PassTimes()
    assert clock.share() == 0
    clock.passes, clock.plain, clock.steps = [0.008, 0.008, 0.5], [0.006], [0.010, 0.010, 0.5]
    assert clock.share() == pytest.approx(0.2)
    clock.plain = [0.009]  # noise: less than nothing is nothing
    assert clock.share() == 0


def test_speed_is_told_as_it_was_measured():
    def words(mine: tuple[float, float], other: tuple[float, float], load: float) -> str:
        ours, theirs = ({"seconds": seconds, "share": share} for seconds, share in (mine, other))
        return demo.format_speed(ours, theirs, load, 2)

    assert words((20.0, 0.03), (26.0, 0.2), 9.0) == "gloo took 1.30 times as long as symcomm."
    calm = words((20.0, 0.03), (20.1, 0.095), 2.1)
    assert calm.startswith("symcomm took 20.0 s, gloo 20.1 s: no faster in this run. Communication was 3.0% of a step")
    assert "9.5% on gloo. Those are medians" in calm and "busy" not in calm
    assert words((21.0, 0.1), (20.0, 0.095), 2.1).endswith("was 10.0% of a step on symcomm and 9.5% on gloo.")
    for share in (0.03, 0.1):
        assert words((21.0, share), (20.0, 0.095), 5.1).endswith(
            " This machine is busy (load 5.1 on 2 cores): run it again when it is idle."
        )


def test_smoothing_starts_at_the_first_value():
    assert demo_plot.smooth([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert demo_plot.smooth([4.0, 2.0], weight=0.5) == pytest.approx([4.0, 8 / 3])


def test_a_plot_in_text():
    falling, rising = [(0.0, 2.0), (10.0, 1.0)], [(0.0, 1.0), (10.0, 2.0)]
    lines = demo_plot.text_plot({"down": falling, "up": rising}, width=4, height=2)
    assert lines[0] == [("  2.00 ", ""), ("⠁", "down"), (" ", ""), (" ", ""), ("⠈", "up")]
    assert lines[1] == [("  1.00 ", ""), ("⡀", "up"), (" ", ""), (" ", ""), ("⢀", "down")]
    assert lines[2][0][0].lstrip().startswith("0 s") and lines[2][0][0].endswith("10 s")
    assert demo_plot.text_plot({}) == []
    assert len(demo_plot.text_plot({"flat": [(0.0, 1.0)]})) == 9


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not demo_plot.draw_picture({"gloo": []}, tmp_path / "figure.svg")

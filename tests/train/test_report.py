"""The report: its numbers, and what it makes of incomplete runs and hostile text."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from report_pages import CURVES, HOSTILE, Page, make_run, metrics, sample

from datc_kernels.testing.rounding import rounding
from datc_train.cli import main
from datc_train.report import write_report
from datc_train.report.groups import band, group_runs, moving_average, window_for
from datc_train.report.heatmap import visible
from datc_train.report.runs import read_run
from datc_train.report.token_plot import _COLUMNS, layout
from datc_train.summary import reward_change


def assert_self_contained(path: Path) -> None:
    """Nothing on the page has an address to be loaded from, but places of the page itself and the empty icon."""
    page = Page(path)
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "audio", "video")
        assert "src" not in attributes
        for name in ("href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:,")), attributes
    styles = re.findall(r"<style>(.*?)</style>", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not any("url(" in style or "@import" in style for style in styles)


EXACT = rounding(torch.float64, length=60, condition=32)  # a sum over a window, of numbers near 3, and one over all of them


def test_moving_average() -> None:
    nan = math.nan
    got = moving_average(np.array([nan, 1.0, 3.0, nan, 8.0]), 2)
    np.testing.assert_array_equal(got, [nan, 1.0, 2.0, 3.0, 8.0])
    values = np.random.default_rng(0).normal(size=60)
    expected = [values[max(0, i - 24) : i + 1].mean() for i in range(60)]
    np.testing.assert_allclose(moving_average(values, 25), expected, rtol=EXACT, atol=EXACT)
    assert [window_for(n) for n in (0, 1, 2, 16, 24, 25, 250)] == [1, 1, 1, 8, 12, 25, 25]


def test_a_band_is_that_of_the_moving_averages_over_common_steps(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / str(seed), steps=30 - seed, seed=seed)) for seed in range(3)]
    (group,) = group_runs(runs)
    got = band(group, "reward_mean")
    assert got.steps.tolist() == list(range(1, 29))
    assert got.window == 25
    assert got.raw is None
    middle = moving_average(1 + 0.1 * np.arange(1, 29), 25)
    np.testing.assert_allclose(got.mean, middle)
    np.testing.assert_allclose(got.low, middle - 1)
    np.testing.assert_allclose(got.high, middle + 1)


def test_rounding_does_not_look_like_an_event() -> None:
    """The effective sample size of GRPO is 1 up to rounding: its axis spans a thousandth of it, without an offset."""
    from matplotlib.figure import Figure

    from datc_train.report.figures import _not_too_close

    axes = Figure().subplots()
    axes.plot([1, 2, 3], [1.0, 1.0 + 1e-16, 1.0 - 2e-16])
    _not_too_close(axes)
    low, high = axes.get_ylim()
    assert low < 0.9996
    assert high > 1.0004


def test_groups_are_methods_and_whatever_else_differs_but_the_seed(tmp_path: Path) -> None:
    runs = [
        read_run(make_run(tmp_path / "a", steps=1, method="datc", learning_rate=1e-3, seed=1)),
        read_run(make_run(tmp_path / "b", steps=1, method="datc", learning_rate=1e-3, seed=0, run_dir="b")),
        read_run(make_run(tmp_path / "c", steps=1, method="datc", learning_rate=2e-3)),
        read_run(make_run(tmp_path / "d", steps=1, method="grpo", learning_rate=1e-3)),
    ]
    groups = group_runs(runs)
    assert [g.label for g in groups] == ["grpo", "datc (learning_rate 0.001)", "datc (learning_rate 0.002)"]
    assert [run.name for run in groups[1].runs] == ["b", "a"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(make_run(tmp_path_factory.mktemp("runs") / "one"))


def test_one_run(report: Path) -> None:
    assert report.name == "report.html"
    pictures = {path.name for path in (report.parent / "figures").iterdir()}
    named = CURVES | {"phase_seconds", "phase_seconds_total"} | {f"tokens_{i}" for i in range(1, 7)}
    assert pictures == {f"{name}.png" for name in named}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (report.parent / "figures").iterdir())
    page = Page(report)
    assert len(page.tagged("figure")) == 7
    text = " ".join(page.text)
    assert "moving average over the last 25 steps" in text
    assert "30 of 30" in text
    assert "+0.500 → +30.500" in text
    change = reward_change([metrics(s) for s in range(1, 31)])
    assert change is not None
    assert f"{change[1] - change[0]:+.3f} ± {change[2]:.2g}" in text
    # First, middle and last step; of each the responses of highest and lowest advantage.
    assert len(page.tagged("div", "panel")) == 6
    assert [len(page.tagged("div", sign)) for sign in ("up", "down")] == [3, 3]


def test_nothing_is_loaded_from_anywhere(report: Path) -> None:
    assert_self_contained(report)


def test_text_is_text(report: Path) -> None:
    """Markup in a token stays text, in the page and in the script's data; bytes that HTML cannot hold become signs."""
    page = Page(report)
    html = report.read_text(encoding="utf-8")
    assert HOSTILE not in html
    assert html.count("</script>") == len(page.data) + 1
    assert not page.tagged("img")
    assert HOSTILE in "".join(page.text)
    assert page.data[0]["token"] == [visible(t).rstrip("\n") for t in sample(1)["tokens"]]
    assert page.data[0]["alternatives"][0][1] == [HOSTILE, 0.25, -0.0125, False]
    assert page.data[0]["alternatives"][3][0] == [HOSTILE, 0.5, 0.75, True]
    assert "\x00" not in html


def test_visible() -> None:
    assert visible("a\n\tb\r\x00\x07\ud800\u202e\u2028é字🙂") == "a↵\n⇥\tb␍␀␇⟨D800⟩⟨202E⟩⟨2028⟩é字🙂"


def test_weights_become_shades(report: Path) -> None:
    tokens = Page(report).tagged("span", "t")[1:7]  # the first is the legend's
    assert [sorted((t["class"] or "").split()) for t in tokens] == [
        ["t", "u"],
        ["d", "t"],
        ["f", "t"],
        ["t", "u"],
        ["t"],
        ["f", "t"],
    ]
    assert [t.get("style") for t in tokens] == ["--a:1.00", "--a:1.00", None, "--a:0.29", None, None]  # log 1.5 / log 4


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_just_begun(tmp_path: Path, steps: int) -> None:
    run = make_run(tmp_path / "run", steps=steps, evaluated=False, samples=[])
    text = " ".join(Page(write_report(run)).text)
    assert ("No step is done yet" if steps == 0 else f"{steps} of 30 steps are done") in text
    assert "No responses were kept" in text


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    for name in ("metrics", "samples", "eval"):
        with (run / f"{name}.jsonl").open("ab") as file:
            file.write(b'{"step": 5, "reward_mean": 0.')
    assert "4 of 30" in " ".join(Page(write_report(run)).text)


def test_undefined_metrics_are_named_not_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    lines = [metrics(s) | {"kl": None, "entropy": None if s == 2 else 1.0} for s in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_report(run)
    assert "KL to the start: not measured (beta is 0)" in " ".join(Page(page).text)
    assert not (run / "figures" / "kl.png").exists()
    assert (run / "figures" / "entropy.png").exists()


def test_older_lines_of_samples_lack_columns(tmp_path: Path) -> None:
    """Neither alternatives nor credit nor weights, one column too short: shown as not known."""
    bare = {key: sample(1)[key] for key in ("step", "tokens", "response")} | {"weight": [2.0], "credit": None}
    run = make_run(tmp_path / "run", steps=1, samples=[bare], evaluated=False)
    (data,) = Page(write_report(run)).data
    assert data["weight"] == [2.0, None, None, None, None, None]
    assert data["credit"] == [None] * 6
    assert data["alternatives"] == [[]] * 6


def test_the_later_of_two_lines_of_a_step_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(2) | {"reward_mean": 9.0}) + "\n")
    assert read_run(run).values("reward_mean").tolist() == pytest.approx([0.1, 9.0, 0.3])


def test_several_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{m}{s}", method=m, seed=s, steps=30 if s else 20) for m in ("grpo", "datc") for s in (0, 1)]
    page = write_report([str(run) for run in [*runs, runs[0]]], tmp_path / "out" / ".." / "all.html")
    assert page.resolve() == (tmp_path / "all.html").resolve()
    assert (tmp_path / "all_figures" / "methods.png").exists()
    assert_self_contained(page)
    seen = Page(page)
    text = " ".join(seen.text)
    assert "4 runs" in text
    assert "grpo: 2, datc: 2" in text
    assert "band: from the lowest to the highest of their moving averages" in text
    # The same prompt in both methods: steps 1, 11 or so and 20, the last that seed 0 has.
    assert len(seen.tagged("article", "exhibit")) == 3
    assert len(seen.tagged("div", "panel")) == 6
    assert "prompt 20" in text


def test_runs_without_a_common_prompt_stand_one_after_the_other(tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", steps=1, method="grpo", samples=[sample(1, "left")])
    b = make_run(tmp_path / "b", steps=1, samples=[sample(1, "right", a) for a in (1.0, -1.0)])
    text = " ".join(Page(write_report([a, b], tmp_path)).text)
    assert (tmp_path / "report.html").exists()
    assert "left" in text
    assert "right" in text


def test_without_out_several_runs_land_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / name, steps=1, samples=[]) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    assert write_report(runs) == Path("report.html")
    assert (tmp_path / "figures").is_dir()


def broken(folder: Path, what: str) -> Path:
    run = make_run(folder / "run", steps=2)
    if what == "no config":
        (run / "config.yaml").unlink()
    elif what == "a file":
        return run / "config.yaml"
    elif what == "not there":
        return folder / "nothing"
    elif what == "no mapping":
        (run / "config.yaml").write_text("- 1\n")
    elif what == "no YAML":
        (run / "config.yaml").write_text("a: [")
    elif what == "a broken line":
        (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    elif what == "no step":
        (run / "samples.jsonl").write_text("[1]\n")
    return run


@pytest.mark.parametrize("what", ["no config", "a file", "not there", "no mapping", "no YAML", "a broken line", "no step"])
def test_what_is_no_run(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = broken(tmp_path, what)
    with pytest.raises(ValueError, match=r"^run: expected "):
        write_report(path)
    with pytest.raises(SystemExit) as stop:
        main(["report", str(path)])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("datc: run: expected ")


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^run: expected at least one"):
        write_report([])
    with pytest.raises(ValueError, match=r"^out: expected a file that ends in \.html"):
        write_report(make_run(tmp_path / "run", steps=1), tmp_path / "page.pdf")


def test_tokens_break_where_they_have_to(tmp_path: Path) -> None:
    from datc_train.report.heatmap import Token

    words = tuple(Token(text, 0.0, False) for text in ("ab", "c" * _COLUMNS, "↵\n", "字" * 3, ""))
    lines = [(line, column, text) for line, column, text, _ in layout(words)]
    assert lines == [(0, 0, "ab"), (0, 2, "c" * (_COLUMNS - 2)), (1, 0, "cc"), (1, 2, "↵"), (2, 0, "字" * 3)]


def test_looking_loads_no_torch() -> None:
    code = "import sys, datc_train.report; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_real_run_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shape = "--steps 2 --max_new_tokens 6 --group_size 3 --device cpu"
    main(["train", "--config", "tiny", *shape.split(), "--run_dir", str(run)])
    capsys.readouterr()
    main(["report", str(run)])
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert_self_contained(run / "report.html")
    for data in Page(run / "report.html").data:
        assert all(len(found) == 5 for found in data["alternatives"])
        assert all(a is not None for found in data["alternatives"] for _, _, a, _ in found)

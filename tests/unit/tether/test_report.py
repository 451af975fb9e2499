"""The report of a run: one self-contained page that says what the files say, for either kind of model."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.browser import chromium, look
from tether.report import main, page
from tether.report_charts import _nice, lines, number, stacked
from tether.run_directory import RunDirectory

VOID = {"meta", "link", "br"}


class Strict(HTMLParser):
    """Checks that elements nest, and collects addresses and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def metrics_line(update: int, **more: Any) -> dict[str, Any]:
    return {
        "update": update,
        "reward_mean": update / 10,
        "loss": None if update == 2 else 0.1,
        "logprob_diff_mean": 1e-7,
        "logprob_diff_max": 1e-6,
        "num_response_tokens": 100,
        "rollout_seconds": 2.0,
        "train_seconds": 1.0,
        "publish_seconds": 0.1,
        "response_length_mean": 4.0,
        "tripped": [],
        **more,
    }


def sample(**more: Any) -> dict[str, Any]:
    return {
        "prompt_token_ids": [3, 4],
        "response_token_ids": [5, 6, 7],
        "response": "",
        "label": "<b>t5</b>",
        "reward": 1.0,
        "advantage": 0.5,
        **more,
    }


@pytest.fixture
def run(tmp_path: Path, tiny_ouro: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "a run & more")
    directory.create({"model": str(tiny_ouro), "settings": {"lr": 1e-3}, "contract": {}})
    return directory


def read(text: str) -> Strict:
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def test_page_is_one_file_and_says_what_the_run_says(run: RunDirectory) -> None:
    """Nothing is loaded from elsewhere and nothing runs; depths colour tokens; text of a run is never markup."""
    for update in (1, 2, 3):
        told = ["trip_reward: <fell>"] * (update == 3)
        run.append_metrics(metrics_line(update, depth_histogram=[0, 1, 2, update], tripped=told))
    run.append_event("start", update=0, incarnation=1)
    masked = sample(exit_depths=[4, 1, 2], loss_mask=[True, False, True], reward=None)
    run.write_rollouts(3, [sample(exit_depths=[4, 2, 3]), masked])
    parser = read(page(run))
    assert set(parser.addresses) == {"data:,"} and not {"script", "img", "iframe", "b"} & set(parser.tags) - {"b"}
    for words in (
        "a run & more",
        "3 updates, mean reward 0.300",
        "trip_reward: <fell>",
        "<b>t5</b>",
        "not trained on",
        "Loops of generated tokens",
        "t3 t4",
        "incarnation 1",
    ):
        assert words in parser.text, words
    text = page(run)
    assert re.findall(r'title="(\d) loops">(t\d)', text) == [
        ("4", "t5"),
        ("2", "t6"),
        ("3", "t7"),
        ("4", "t5"),
        ("2", "t7"),
    ]


def test_seconds_of_a_publication_are_counted_once(run: RunDirectory) -> None:
    """An update's column has its phases, publication whole; what a publication consists of has a chart of its own."""
    run.append_metrics(metrics_line(1))
    run.append_metrics(metrics_line(2, publish_write_seconds=0.06, publish_read_back_seconds=0.03))
    charts = re.findall(r"<figure><figcaption><b>(.*?)</b>.*?<figcaption class=\"keys\">(.*?)</figcaption>", page(run))
    keys = {title: [key.strip() for key in re.findall("</i>(.*?)</span>", text)] for title, text in charts}
    assert keys["Seconds of an update"] == ["rollout", "train", "publish"]
    assert keys["Publication (seconds)"] == ["all of it 0.1", "write 0.06", "read back 0.03"]


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
def test_page_opens_in_a_browser_at_both_widths(run: RunDirectory, tmp_path: Path) -> None:
    """No error, and nothing sticks out at 1280 or at 400 px, with long words in a sample."""
    for update in range(1, 40):
        run.append_metrics(metrics_line(update, depth_histogram=[5, 1, 2, update], expert_load=[[1] * 64] * 16))
    long = sample(exit_depths=[4, 2, 3], label="x" * 300, prompt_token_ids=[9] * 200)
    run.write_rollouts(39, [long] * 30)
    (tmp_path / "report.html").write_text(page(run))
    for width, (content, window, title) in look(tmp_path / "report.html", tmp_path).items():
        assert content <= window == width and not title.startswith("ERROR")


def test_experts_are_a_heat_map_and_depths_are_absent(run: RunDirectory) -> None:
    """A model without loops has no depth charts, and its samples no colours."""
    run.append_metrics(metrics_line(1, expert_load=[[3, 0, 1], [1, 1, 2]]))
    run.write_rollouts(1, [sample()])
    text = page(run)
    assert 'fill-opacity="1.000"><title>layer 0, expert 0: 3</title>' in text
    assert 'fill-opacity="0.500"><title>layer 1, expert 0: 1</title>' in text
    assert "Loops" not in read(text).text


def test_a_line_is_where_its_numbers_are() -> None:
    """The first update at the left axis, the last at the right; the least value at the bottom; logarithms evenly."""
    points = re.findall(
        r"points=\"([^\"]+)\"", lines([{"update": 1, "a": 2.0}, {"update": 3, "a": 4.0}], {"a": "a"}, title="t")
    )
    assert points == ["46.0,150.0 334.0,8.0"]
    chart = lines([{"update": u, "a": 10.0**-u} for u in (1, 2, 3)], {"a": "a"}, title="t", log=True)
    assert re.findall(r"points=\"([^\"]+)\"", chart) == ["46.0,8.0 190.0,79.0 334.0,150.0"]
    assert lines([{"update": 1, "a": None}], {"a": "a"}, title="t") == ""
    heights = re.findall(r'height="([\d.]+)" fill', stacked([{"update": 1, "h": [1, 3]}], "h", title="t"))
    assert heights == ["35.5", "106.5"]
    assert _nice(0.3) == 0.5 and _nice(21.0) == 25.0 and _nice(1e-3) == 1e-3
    assert [number(x) for x in (0.12345, 1234.5, 123456.0)] == ["0.123", "1.23e+03", "1.2e+05"]


def test_command_writes_the_file_or_says_why_not(run: RunDirectory, tmp_path: Path, capsys: Any) -> None:
    """RUN/report.html by default; a run without an update, or no run, is an error with status 2."""
    assert main([str(run.path)]) == 2 and "no update was made yet" in capsys.readouterr().err
    assert main([str(tmp_path / "nowhere")]) == 2
    run.append_metrics(metrics_line(1))
    run.run_file.write_text(json.dumps({"model": "/moved/away", "contract": {}}))
    run.write_rollouts(1, [sample()])
    assert main([str(run.path)]) == 0
    assert "5 6 7" in read((run.path / "report.html").read_text()).text.replace("  ", " ")

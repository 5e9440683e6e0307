import json
from xml.etree import ElementTree

import pytest

from layerwise.train.metrics import Record, to_json
from layerwise.train.report import Records, html_report, line_chart, loss_curve, nice_ticks, series_of
from tests.unit.train.test_metrics import end_record, eval_record, run_record, step_record

_SVG = "{http://www.w3.org/2000/svg}"


def records_of(*records: Record) -> Records:
    return [json.loads(to_json(record)) for record in records]


def a_run(steps: int = 40) -> Records:
    middle: list[Record] = []
    for step in range(1, steps + 1):
        middle.append(step_record(step, loss=5.0 / step))
        if step % 10 == 0:
            middle.append(eval_record(step, val_bpb=8.0 - step / 10))
    return records_of(run_record(), eval_record(0, 8.0), *middle, end_record(steps))


def xml_of(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def test_curve_is_valid_xml_with_a_line_for_training_and_one_for_validation() -> None:
    tree = ElementTree.fromstring(loss_curve(a_run()))
    lines = tree.findall(f"{_SVG}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [40, 5]
    labels = [text.text for text in tree.findall(f"{_SVG}text")]
    assert {"training", "validation", "step", "bits per byte"} <= set(labels)


def test_page_is_well_formed_and_stands_alone() -> None:
    page = html_report(a_run())
    tree = xml_of(page)
    assert tree.tag == "html"
    assert tree.find("body/h1") is not None
    for word in ("<script", "href=", "src=", "@import", "url("):
        assert word not in page
    assert "2 on cpu" in page
    assert "betas" in page


@pytest.mark.parametrize(
    "records", [[], records_of(run_record()), records_of(eval_record(0)), records_of(step_record(1), step_record(2))]
)
def test_unfinished_runs_have_a_report_too(records: Records) -> None:
    ElementTree.fromstring(loss_curve(records))
    assert "the run did not end" in html_report(records)
    xml_of(html_report(records))


def test_values_that_are_not_finite_leave_a_gap_and_no_nan_in_the_picture() -> None:
    records = records_of(
        step_record(1), step_record(2, loss=float("nan")), step_record(3, loss=float("inf")), step_record(4)
    )
    assert [step for step, _ in series_of(records, "step", "loss")] == [1, 4]
    assert "nan" not in loss_curve(records).lower()


def test_text_from_the_run_is_escaped() -> None:
    records = records_of(run_record())
    records[0]["routing"] = "<b>&\"'"  # type: ignore[index]
    page = html_report(records)
    assert "<b>" not in page
    xml_of(page)


def test_long_runs_make_small_files_and_keep_their_last_point() -> None:
    long = [{"kind": "step", "step": step, "bpb": 1.0 + 1.0 / step} for step in range(1, 100_001)]
    curve = loss_curve(long)
    assert len(curve) < 60_000
    points = ElementTree.fromstring(curve).findall(f"{_SVG}polyline")[0].attrib["points"].split()
    assert points[-1].startswith("744")


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0.0, 100.0, 5) == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    assert nice_ticks(3.0, 3.0) == [3.0]
    for low, high in ((0.013, 0.019), (-7.0, 1e6), (1e-9, 2e-9)):
        ticks = nice_ticks(low, high)
        assert 2 <= len(ticks) <= 8
        assert all(low - 1e-12 <= tick <= high + 1e-12 for tick in ticks)


def test_a_chart_without_lines_is_still_a_chart() -> None:
    ElementTree.fromstring(line_chart("empty", "nothing", ()))

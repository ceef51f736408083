"""Does a report say what was measured: the lanes, who waited for whom, memory by tier, planned and floor?"""

import json
import time

import pytest
import torch

import headrace
from headrace.cli.main import main
from headrace.report import Report, RunRecord, Span
from headrace.runtime.lanes import Lanes
from tests.report.conftest import stack

BLOCK = 256 * 256 * 4 + 256 * 4
LAYERS = 6


class Paused:
    """An event that the host asks for late."""

    def __init__(self, event, seconds: float) -> None:
        self.event, self.seconds = event, seconds

    def synchronize(self) -> None:
        time.sleep(self.seconds)
        self.event.synchronize()


@pytest.mark.emu("lazy")
def test_the_last_step_is_measured_against_the_plan(report: Report) -> None:
    record = report.record
    assert record.planned is not None
    assert record.step_seconds == pytest.approx(record.planned.cycle_seconds, rel=0.25)
    assert record.step_seconds >= record.compute_seconds > 0
    assert record.lanes == ["compute", "onload", "offload"]
    assert record.achieved_rate("onload") == pytest.approx(1e9, rel=0.05)
    offloaded = sum(span.nbytes for span in record.of_lane("offload"))
    assert offloaded == LAYERS * BLOCK
    text = str(report)
    for part in (
        "Stack (1.51 MiB of weights) on emu",
        "last step",
        "planned",
        "no schedule is below",
        "onload     busy",
        "stall      layers.",
    ):
        assert part in text


@pytest.mark.emu("lazy")
@pytest.mark.parametrize("device_memory", ["900KiB", "4MiB"])  # blocks come and go, and all of them stay
def test_a_plan_of_a_busy_machine_is_made_anew(emu_device, slow_link, device_memory: str) -> None:
    """What no schedule can beat at the speeds of the plan is beaten when compute is quicker than it was then."""
    model = stack()
    emu_device.configure(flops_per_second=1e9)
    with headrace.offload(model, device="emu", device_memory=device_memory, blocks=[model.layers]) as handle:
        for step in range(12):
            if step == 6:
                emu_device.configure(flops_per_second=1e12)
            model(torch.randn(64, 256)).sum().backward()
        record = handle.report().record
    assert record.planned is not None
    assert record.step_seconds >= 0.9 * record.planned.lower_bound_seconds > 0


@pytest.mark.emu("lazy")
def test_stalls_name_the_copy_that_was_waited_for(report: Report) -> None:
    stalls = report.record.stalls()
    assert [stall.seconds for stall in stalls] == sorted((stall.seconds for stall in stalls), reverse=True)
    # In backward compute also waits for gradients to leave; and short ones are what the host takes to ask.
    long = [stall for stall in stalls if stall.seconds > 50e-6 and stall.visit.endswith("forward")]
    assert long
    for stall in long:
        assert stall.lane == "onload"
        assert stall.what == stall.visit.split()[0]  # the block's own weights
    measured = sum(span.seconds for span in report.record.spans if span.name == "stall")
    assert sum(stall.seconds for stall in stalls) == pytest.approx(measured)


def test_waits_for_the_host_are_one_row_behind_those_for_copies() -> None:
    spans = [Span("compute", "stall", float(step), 0.5, 0, f"layers.{step} forward") for step in range(8)]
    spans.append(Span("onload", "onload", 3.0, 0.5, 8, "layers.3"))
    record = RunRecord(device="cpu", stats=None, spans=tuple(spans), samples=(), planned=None, rates={})
    assert [(stall.visit, stall.seconds) for stall in record.shown_stalls()] == [
        ("layers.3 forward", 0.5),
        ("7 visits", 3.5),
    ]


def test_handles_and_reports_say_what_they_are(tmp_path) -> None:
    model = stack()
    with headrace.offload(model, device="cpu", device_memory="900KiB", blocks=[model.layers]) as handle:
        assert repr(handle).startswith("<Stack (1.51 MiB of weights), offloaded on cpu: device_memory='900 KiB'")
        model(torch.randn(64, 256)).sum().backward()
        report = handle.report()
    assert repr(handle) == "<Stack (1.51 MiB of weights), removed>"
    assert repr(report) == str(report)
    assert report._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')


@pytest.mark.emu("lazy")
def test_a_pipeline_shows_its_largest_part(emu_device, slow_link) -> None:
    """The last call is of a small part, whose copies are not shown either."""
    parts = torch.nn.ModuleDict({"transformer": stack(), "vae": torch.nn.Sequential(torch.nn.Linear(256, 256))})
    with torch.no_grad(), headrace.offload(parts, device="emu", device_memory="900KiB", blocks="200KiB") as handle:
        for _ in range(4):
            parts["transformer"](torch.randn(64, 256))
        parts["vae"](torch.randn(64, 256))
        record = handle.report().record
    assert {span.what or span.name for span in record.spans if "vae" in span.what + span.name} == set()
    assert any("transformer" in span.name for span in record.of_lane("compute"))
    assert record.model.startswith("transformer, vae")


@pytest.mark.emu("lazy")
def test_memory_by_tier_is_what_the_ledger_counts(report: Report) -> None:
    samples = report.record.samples
    assert len(samples) >= 2 * LAYERS - 1
    assert max(sample.device_bytes for sample in samples) <= 900 * 1024 + 2 * BLOCK  # and gradients of two blocks
    assert min(sample.host_bytes for sample in samples) >= 2 * LAYERS * BLOCK  # weights and gradients
    assert [sample.seconds for sample in samples] == sorted(sample.seconds for sample in samples)


@pytest.mark.emu("lazy")
def test_a_saved_run_is_shown_again(report: Report, tmp_path, capsys) -> None:
    path = tmp_path / "headrace-run.json"
    report.save(path)
    assert RunRecord.from_json(path.read_text()) == report.record
    assert main(["report", str(tmp_path), "--png", str(tmp_path / "a.png"), "--trace", str(tmp_path / "t.json")]) == 0
    assert "last step" in capsys.readouterr().out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "a.png").read_bytes()) > 10_000


@pytest.mark.extended
@pytest.mark.emu("lazy", "random:3")
def test_the_same_run_takes_the_same_virtual_time(emu_device, slow_link, monkeypatch) -> None:
    """Whenever the machine lets threads run: the worker that adds up gradients is late, or who gave it work is."""
    settings = emu_device.settings()
    run = Lanes.run

    def spans(worker_pause: float, own_pause: float) -> list[Span]:
        def paused_run(self: Lanes, job, after):
            submitted = run(self, job, Paused(after, worker_pause))
            time.sleep(own_pause)
            return submitted

        monkeypatch.setattr(Lanes, "run", paused_run)
        emu_device.reset(**settings)
        torch.manual_seed(0)
        model = stack()
        with headrace.offload(model, device="emu", device_memory="900KiB", blocks=[model.layers]) as handle:
            for _ in range(4):
                model(torch.randn(64, 256)).sum().backward()
            return list(handle.report().record.spans)

    assert spans(0, 0) == spans(0.02, 0) == spans(0, 0.02)


def test_what_is_no_run_is_refused(tmp_path, capsys) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"version": 0}')
    assert main(["report", str(path)]) == 2
    assert "no run record of version 3" in capsys.readouterr().err
    for text in ("", "[]", "null", "3", '{"version": 3, "stats": null, "planned": null}', "\x00" * 100):
        path.write_text(text)
        assert main(["report", str(path)]) == 2
        assert "no run record of version 3" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


def test_a_run_on_the_cpu_and_the_profiler_share_a_trace(tmp_path) -> None:
    """The profiler's events of the visits lie within our visits' spans: one clock for both."""
    model = stack()
    with headrace.offload(model, device="cpu", device_memory="900KiB", blocks=[model.layers]) as handle:
        for _ in range(3):
            model(torch.randn(64, 256)).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            model(torch.randn(64, 256)).sum().backward()
        profiler.export_chrome_trace(str(tmp_path / "torch.json"))
        handle.report().to_trace(tmp_path / "both.json", profiler_trace=tmp_path / "torch.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    ours = [e for e in events if e.get("pid") == 1_000_000 and e["ph"] == "X" and e["tid"] == 0]
    products = [e for e in events if e.get("name") == "aten::addmm" and e["ph"] == "X"]
    assert len(products) == LAYERS
    visits = [e for e in ours if e["name"].endswith("forward")]

    def is_inside(product: dict, visit: dict) -> bool:
        slack = 500  # microseconds
        ends = product["ts"] + product["dur"], visit["ts"] + visit["dur"]
        return visit["ts"] - slack <= product["ts"] and ends[0] <= ends[1] + slack

    assert all(any(is_inside(product, visit) for visit in visits) for product in products)


@pytest.mark.emu("lazy")
def test_probed_rates_stand_beside_the_measured(report: Report) -> None:
    record = report.record
    probed = Report(RunRecord.from_json(record.to_json().replace('"rates": {}', '"rates": {"onload": 2e9}')))
    share = record.achieved_rate("onload") / 2e9
    assert f"of 2.00 probed ({share:.0%})" in str(probed)
    slower = Report(RunRecord.from_json(record.to_json().replace('"rates": {}', '"rates": {"onload": 5e8}')))
    assert "more than the 0.50 that headrace probe reached" in str(slower)
    assert 0.4 < share < 0.51


def test_activations_alone_are_shown_by_name() -> None:
    """Two spaces in a value are no column."""
    rows = (("activations offloaded", "3 GiB in  4 copies"), ("advice", "recompute them"))
    alone = RunRecord(device="cpu", stats=None, spans=(), samples=(), planned=None, rates={}, activations=rows)
    assert RunRecord.from_json(alone.to_json()) == alone
    assert str(Report(alone)) == "activations offloaded  3 GiB in  4 copies\nadvice                 recompute them\n"
    for wrong in ("in words", [["advice"]], [["advice", 3]]):
        with pytest.raises(ValueError, match="no run record of version 3"):
            RunRecord.from_json(json.dumps(json.loads(alone.to_json()) | {"activations": wrong}))


HOSTILE = "[/a] </script><img src=x onerror=alert(1)> :smile: ]]>\u2028"


@pytest.mark.emu("lazy")
def test_names_are_shown_as_they_are(report: Report, tmp_path, capsys) -> None:
    named = report.record.to_json().replace("layers.", json.dumps(HOSTILE)[1:-1])
    (tmp_path / "run.json").write_text(named)
    assert main(["report", str(tmp_path / "run.json"), "--html", str(tmp_path / "run.html")]) == 0
    shown = "".join(capsys.readouterr().out.split())
    assert "[/a]" in shown
    assert ":smile:" in shown
    assert (tmp_path / "run.html").read_text().count("</script>") == 1


@pytest.mark.emu("lazy")
def test_a_record_with_words_for_numbers_is_refused(report: Report) -> None:
    fields = json.loads(report.record.to_json())
    for place, wrong in (("spans", ["compute", "x", 0.0, "long"]), ("samples", [0.0, -1, 2, 3]), ("spans", [1])):
        with pytest.raises(ValueError, match="no run record of version 3"):
            RunRecord.from_json(json.dumps(fields | {place: [wrong]}))
    with pytest.raises(ValueError, match="'many' among the stats is no number"):
        RunRecord.from_json(json.dumps(fields | {"stats": fields["stats"] | {"onloads": "many"}}))
    with pytest.raises(ValueError, match="nan among the rates is no number"):
        RunRecord.from_json(json.dumps(fields | {"rates": {"onload": float("nan")}}))


def test_a_long_record_is_looked_through_once(monkeypatch) -> None:
    """10,000 waits, each for one of as many copies: spans that are looked at grow with the record, not its square."""
    counts = 0

    def covered(times, first=0.0, last=float("inf")) -> float:
        nonlocal counts
        counts += len(times)
        return sum(max(0.0, min(last, end) - max(first, begin)) for begin, end in times)

    monkeypatch.setattr(headrace.report.record, "covered", covered)
    spans = []
    for step in range(10_000):
        begin = 2.0 * step
        block = f"layers.{step % 4}"
        spans += [Span("fetch", "read", begin, 0.9, 8, block), Span("onload", "load", begin + 0.9, 0.1, 8, block)]
        spans += [Span("compute", "stall", begin, 1.0, 0, block), Span("compute", block, begin + 1, 1.0)]
    record = RunRecord(device="cpu", stats=None, spans=tuple(spans), samples=(), planned=None, rates={})
    assert {stall.lane for stall in record.stalls()} == {"fetch"}
    assert record.stall_seconds("fetch") == pytest.approx(10_000)
    assert counts <= 10_000

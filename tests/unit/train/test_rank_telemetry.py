"""What ranks tell each other beside their reports, between ranks that are threads."""

from __future__ import annotations

from types import SimpleNamespace

from crossbow_py.distributed.ranks import Place, Ranks
from crossbow_py.distributed.synchronisation import Report
from crossbow_py.train.loop.rank_telemetry import RankTelemetry
from tests.thread_ranks import on_threads

SAMPLES = ({"gpu/0/utilization_percent": 50.0, "gpu/0/power_w": 300.0}, None, {"gpu/0/utilization_percent": 100.0})


def telemetry_of(ranks, num_ranks):
    """Rank r waits r seconds in every second round's ten; the node of ranks 0 and 1 has a GPU that is read."""
    run = SimpleNamespace(
        ranks=ranks, places=[Place(rank // 2, f"host-{rank // 2}") for rank in range(num_ranks)],
        tokens_per_sample=None, train_feed=SimpleNamespace(STREAMS=False), state=SimpleNamespace(round_index=0),
    )  # fmt: skip
    meter = SimpleNamespace(waited_s=0.0, rank_wait_s=0.0, samples=0)
    sample = SAMPLES[ranks.rank]
    monitor = None if sample is None else SimpleNamespace(newest=sample)
    return run, meter, RankTelemetry(run, meter, monitor)


def synchronise_twice(ranks):
    run, meter, telemetry = telemetry_of(ranks, 3)
    telemetry.exchange(Report(0.0))
    run.state.round_index, meter.samples, meter.rank_wait_s = 2, 96, float(ranks.rank)
    return telemetry.exchange(Report(10.0, signal=ranks.rank, num_compared=7)), telemetry


def test_reports_come_back_whole_and_figures_are_the_same_on_all_ranks():
    found = on_threads(synchronise_twice, 3)
    for reports, telemetry in found:
        assert reports == [Report(10.0, signal=rank, num_compared=7.0) for rank in range(3)]
        paces = telemetry.paces.recent
        assert [(each.host, each.step_ms) for each in paces] == [
            ("host-0", 5000.0), ("host-0", 4500.0), ("host-1", 4000.0),
        ]  # fmt: skip
        assert [each.images_per_s for each in paces] == [3.2, 32 / 9, 4.0]
        assert telemetry.gpus == {
            "gpus/utilization_percent/lowest": 50.0, "gpus/utilization_percent/mean": 75.0, "gpus/memory_gib/most": 0.0,
            "gpus/power_kw/total": 0.3,
        }  # fmt: skip


def test_single_rank_exchanges_nothing_and_has_no_pace():
    _, _, telemetry = telemetry_of(Ranks(), 1)
    report = Report(1.0)
    assert telemetry.exchange(report) == [report]
    assert telemetry.paces.recent == telemetry.paces.whole == ()
    assert telemetry.gpus == {}

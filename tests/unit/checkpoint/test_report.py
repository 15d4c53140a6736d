"""The report of a load as text."""

from __future__ import annotations

from tp_transformers.checkpoint.reading.report import LoadReport


def test_a_report_names_small_sizes_too() -> None:
    report = LoadReport(1, (1_500_000_000, 287_430_000), 0.5, 0.4, 287_431_000, 9, peak_buffer=0, mapped=2_000)
    said = str(report)
    assert said.startswith("rank 1 of 2: 287.4 MB in 0.50 s (0.6 GB/s); read 287.4 MB in 9 reads")
    assert said.endswith("buffers 0; shares 1.50 GB, 287.4 MB; mapped 2.0 kB")


def test_a_report_names_the_split_and_its_reason() -> None:
    report = LoadReport(0, (8, 4), 0.5, 0.4, 8, 1, tp_shares=(2, 1), shares_because="memory")
    assert str(report).endswith("; split 2 : 1 (memory)")
    assert "split" not in str(LoadReport(0, (8, 4), 0.5, 0.4, 8, 1))

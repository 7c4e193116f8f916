from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.report.records import METRICS, MetricsFile, write_atomically


def lines_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]


def test_each_line_is_on_disk_at_once_and_exact(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path, first_step=1)
    metrics.append({"step": 1, "loss": 1 / 3})
    assert lines_of(tmp_path) == [{"step": 1, "loss": 1 / 3}]
    metrics.append({"step": 2, "loss": float("nan"), "lr": [float("inf")]})
    assert lines_of(tmp_path)[1] == {"step": 2, "loss": None, "lr": [None]}


def test_resume_drops_later_steps_and_the_line_cut_off(tmp_path: Path) -> None:
    before = '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 2, "val_loss": 2.5}\n'
    after = '{"step": 3, "loss": 9.0}\n{"step": 4, "lo'
    (tmp_path / METRICS).write_text(before + after)
    metrics = MetricsFile(tmp_path, first_step=3)
    metrics.append({"step": 3, "loss": 1.0})
    assert lines_of(tmp_path) == [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.0},
        {"step": 2, "val_loss": 2.5},
        {"step": 3, "loss": 1.0},
    ]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def no_space(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"

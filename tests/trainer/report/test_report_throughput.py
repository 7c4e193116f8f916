from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trainer.config.schema import HardwareConfig
from trainer.report.throughput import (
    DATA_SHEET,
    MEASURED,
    UNKNOWN,
    Peak,
    Throughput,
    find_peak,
    matmul_flops_per_s,
)


@pytest.fixture
def sheets(tmp_path: Path) -> Path:
    (tmp_path / "auto.yaml").write_text("name: auto\n")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    (tmp_path / "h200.yaml").write_text("name: h200\nmatch: 'H200(?! NVL)'\npeak_bf16_tflops: 989.4\n")
    (tmp_path / "h200_nvl.yaml").write_text("name: h200_nvl\nmatch: H200 NVL\npeak_bf16_tflops: 835.5\n")
    return tmp_path


def not_measured() -> float:
    raise AssertionError("measured although a peak is known, or the device is no CPU")


def test_mfu_by_hand() -> None:
    # 8 B parameters at 6 FLOPs each; 10,000 tokens/s over 2 devices of 989.4e12: 480e12 / 1978.8e12
    throughput = Throughput(flops_per_token=48e9, world_size=2, peak=Peak(989.4e12, DATA_SHEET))
    assert throughput.model_flops_per_s(10_000) == 480e12
    assert throughput.mfu(10_000) == pytest.approx(0.24257125, abs=1e-8)


def test_no_mfu_without_a_peak() -> None:
    assert Throughput(48e9, 2, UNKNOWN).mfu(10_000) is None


def test_configured_peak_comes_first(sheets: Path) -> None:
    hardware = HardwareConfig(peak_bf16_tflops=123.0)
    assert find_peak("NVIDIA H200", hardware, False, hardware_dir=sheets, measure=not_measured) == Peak(
        123e12, DATA_SHEET
    )


def test_peak_by_device_name(sheets: Path) -> None:
    def peak(name: str) -> Peak:
        return find_peak(name, HardwareConfig(), False, hardware_dir=sheets, measure=not_measured)

    assert peak("NVIDIA H200") == Peak(989.4e12, DATA_SHEET)
    assert peak("NVIDIA H200 NVL") == Peak(835.5e12, DATA_SHEET)


def test_peak_of_another_device_is_not_used(sheets: Path, caplog: pytest.LogCaptureFixture) -> None:
    hardware = HardwareConfig(name="h200", match="H200", peak_bf16_tflops=989.4)
    peak = find_peak("AMD EPYC", hardware, True, hardware_dir=sheets, measure=lambda: 5e10)
    assert peak == Peak(5e10, MEASURED)
    assert "hardware=h200 does not fit this device, AMD EPYC" in caplog.text


def test_unknown_gpu_names_the_key_to_set(sheets: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_peak("Brand X", HardwareConfig(), False, hardware_dir=sheets, measure=not_measured) == UNKNOWN
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "Brand X" in caplog.text and "hardware.peak_bf16_tflops" in caplog.text


@pytest.mark.parametrize(
    ("device_name", "tflops"), [("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H200", 989.4), ("NVIDIA H100 PCIe", 756.0)]
)
def test_shipped_sheets(device_name: str, tflops: float) -> None:
    assert find_peak(device_name, HardwareConfig(), False) == Peak(tflops * 1e12, DATA_SHEET)


def test_matmul_leaves_the_random_state_alone() -> None:
    import torch

    before = torch.get_rng_state()
    assert 1e8 < matmul_flops_per_s(side=256, at_least_s=0.01) < 1e14
    assert torch.equal(torch.get_rng_state(), before)

"""Each workaround is still needed, works, and the noise it hides is that noise only."""

from __future__ import annotations

import logging

import pytest
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

from models import compat


@pytest.mark.parametrize("patch", compat.PATCHES, ids=lambda patch: patch.fault[:40])
def test_upstream_still_has_the_fault(patch: compat.Patch) -> None:
    assert patch.faulty(), f"upstream has mended it: {patch.fault}; remove the patch"


def test_checkpoint_without_fp8_is_not_fp8() -> None:
    compat.apply()
    assert CheckpointWithoutOutput(fp8=False).fp8 is False
    assert CheckpointWithoutOutput(fp8="e4m3").fp8 is True


def test_unknown_fields_are_named_with_the_nearest_known_one() -> None:
    compat.check_fields(["recompute_granularity"], "switches")
    with pytest.raises(ValueError, match=r"switches\.recompute_granlarity: .*did you mean recompute_granularity\?"):
        compat.check_fields(["recompute_granlarity"], "switches")


def test_mute_drops_only_what_begins_with_the_prefix(caplog: pytest.LogCaptureFixture) -> None:
    compat.mute("megafit.test", "Harmless")
    compat.mute("megafit.test", "Harmless")
    logger = logging.getLogger("megafit.test")
    logger.warning("Harmless: %d", 1)
    logger.warning("not Harmless")
    assert [record.getMessage() for record in caplog.records] == ["not Harmless"]
    assert len(logger.filters) == 1

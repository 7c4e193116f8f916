from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.schema import WandbMode
from trainer.report.wandb_mode import has_credentials, wandb_mode

ONLINE, OFFLINE, DISABLED = WandbMode.online, WandbMode.offline, WandbMode.disabled


@pytest.mark.parametrize(
    ("configured", "environment", "credentials", "mode"),
    [
        (None, None, True, ONLINE),
        (None, None, False, OFFLINE),
        (None, "disabled", True, DISABLED),
        (None, "offline", True, OFFLINE),
        (None, "dryrun", True, OFFLINE),
        (None, "online", False, OFFLINE),
        (None, "nonsense", True, ONLINE),
        (OFFLINE, "online", True, OFFLINE),
        (DISABLED, "online", True, DISABLED),
        (ONLINE, "disabled", True, ONLINE),
        (ONLINE, None, False, OFFLINE),
    ],
)
def test_mode(configured: WandbMode | None, environment: str | None, credentials: bool, mode: WandbMode) -> None:
    assert wandb_mode(configured, environment, credentials) is mode


def test_credentials(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine wandb.example.org login u password p\nmachine api.wandb.ai login u password p\n")
    assert has_credentials(None, {"WANDB_API_KEY": "k"})
    assert not has_credentials(None, {})
    assert not has_credentials(None, {"NETRC": str(tmp_path / "absent")})
    assert has_credentials(None, {"NETRC": str(file)})
    assert has_credentials("https://wandb.example.org/", {"NETRC": str(file)})
    assert has_credentials(None, {"NETRC": str(file), "WANDB_BASE_URL": "https://wandb.example.org"})
    assert not has_credentials("https://other.example.org", {"NETRC": str(file)})


def test_a_broken_netrc_is_no_credential(tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine api.wandb.ai nonsense")
    assert not has_credentials(None, {"NETRC": str(file)})

"""Whether a run goes to a Weights & Biases server, to a folder, or nowhere. Imports no wandb."""

from __future__ import annotations

import netrc
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from trainer.config.schema import WandbMode

#: wandb's present and historic servers: a key may be stored under either
DEFAULT_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")

# dryrun and run are wandb's older words
_ENVIRONMENT_MODES = {
    "online": WandbMode.online,
    "run": WandbMode.online,
    "offline": WandbMode.offline,
    "dryrun": WandbMode.offline,
    "disabled": WandbMode.disabled,
}


def wandb_mode(configured: WandbMode | None, environment: str | None, credentials: bool) -> WandbMode:
    """The configured mode, else that of WANDB_MODE, else online with credentials and offline without.

    Without credentials online becomes offline: wandb would raise, or at a terminal wait for somebody to type a key.
    """
    wanted = configured or _ENVIRONMENT_MODES.get(environment or "", WandbMode.online)
    return WandbMode.offline if wanted is WandbMode.online and not credentials else wanted


def has_credentials(base_url: str | None, environment: Mapping[str, str]) -> bool:
    """True if wandb would find a key: in WANDB_API_KEY, an identity token, or the netrc entry of the server."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    url = base_url or environment.get("WANDB_BASE_URL")
    hosts: Sequence[str] = (urlsplit(url).netloc,) if url else DEFAULT_HOSTS
    files = (
        [Path(environment["NETRC"])] if environment.get("NETRC") else [Path.home() / ".netrc", Path.home() / "_netrc"]
    )
    return any(_names_host(path.expanduser(), hosts) for path in files)


def _names_host(path: Path, hosts: Sequence[str]) -> bool:
    try:
        entries = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any(host in entries for host in hosts)

"""hydra/launcher=inline: the jobs of a sweep one after the other in this process, which starts once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.megafit.process import job_return

from trainer.report.records import read_result, write_failure
from trainer.report.sweep import read_job


# annotations must be types, not texts: Hydra runs this module before Python can look it up by name
@dataclass
class InlineLauncherConf:
    _target_: str = "hydra_plugins.megafit.inline.InlineLauncher"
    #: refuse the sweep if one of its jobs can't run; false: that job fails when its turn comes
    check_first: bool = True


ConfigStore.instance().store(group="hydra/launcher", name="inline", node=InlineLauncherConf, provider="megafit")


class InlineLauncher(BasicLauncher):
    """Hydra's basic launcher, of which a job that failed is named by the sweep's report as with ours."""

    def __init__(self, check_first: bool) -> None:
        super().__init__()

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return [self._told(returned) for returned in super().launch(job_overrides, initial_job_idx)]

    def _told(self, returned: JobReturn) -> JobReturn:
        if returned.status is JobStatus.COMPLETED:
            return returned
        assert returned.hydra_cfg is not None
        folder = Path(returned.hydra_cfg.hydra.runtime.output_dir)
        if "status" not in read_result(folder):
            write_failure(folder, "failed", str(returned._return_value))
        return job_return(read_job(folder), folder, "val_loss")

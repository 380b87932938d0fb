"""A real Slurm cluster for each file of tests, in namespaces of this machine.

Where it cannot be started the tests are skipped with the reason; with OPENRLHF_EXT_REQUIRE_SLURM=1 they fail.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from vcluster import Cluster, StartError

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "unshare", "nsenter", "ip", "pgrep")


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """Variables of vcluster.sh."""
    return {}


@pytest.fixture(scope="module")
def cluster(settings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        _not_tested(f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge iproute2 procps")
    if os.geteuid() != 0:
        _not_tested("not root, which a network of its own for each node needs")
    try:
        cluster = Cluster(tmp_path_factory.mktemp("slurm"), **settings)
    except StartError as error:
        _not_tested(str(error))
    yield cluster
    cluster.close()


def _not_tested(reason: str) -> None:
    if os.environ.get("OPENRLHF_EXT_REQUIRE_SLURM") == "1":
        pytest.fail(f"OPENRLHF_EXT_REQUIRE_SLURM=1, but there is no Slurm cluster to test on: {reason}")
    pytest.skip(f"NOT TESTED, no Slurm cluster can be started: {reason}")

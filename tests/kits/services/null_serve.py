"""`python -m tests.kits.services.null_serve DRAIN_S PACE_S [NAME]` runs `baton serve` with workers
that compute nothing. NAME is the deployment's name. An environment variable may give the port of a
nursery that the test owns.
"""

import os
import sys

from rich.console import Console

from deploy.base.defaults import BUNDLED_MODEL
from deploy.commands.serve import ServiceManager, run
from deploy.local.deployment import Deployment
from deploy.local.leaving import StopSignals
from deploy.local.nursery import Nursery
from deploy.logs.lines import LogSource, configure_logging
from engine.clock import MonotonicClock
from engine.config import AdminConfig, Config, GatewayConfig, PoolsConfig
from tests.kits.services.lent_nursery import LentNursery
from tests.kits.services.null_workers import NullWorkers

LENT = "BATON_TEST_NURSERY"


def main() -> None:
    configure_logging(LogSource("null"), MonotonicClock())
    drain_s, pace_s = map(float, sys.argv[1:3])
    name = sys.argv[3] if len(sys.argv) > 3 else None
    gateway = GatewayConfig(port=0, drain_timeout_s=drain_s)
    pools = PoolsConfig(mixed=1, max_workers=4)
    config = Config(gateway=gateway, pools=pools, admin=AdminConfig(name=name))
    signals = StopSignals()
    signals.install()
    nursery = LentNursery(os.environ[LENT]) if LENT in os.environ else Nursery()
    launcher = NullWorkers(nursery, pace_s)
    deployment = Deployment(launcher, model=BUNDLED_MODEL, config=config)
    status = run(deployment, Console(stderr=True), ServiceManager(os.environ), signals)
    nursery.close()
    sys.exit(status)


if __name__ == "__main__":
    main()

"""`python -m tests.kits.services.null_serve DRAIN_S PACE_S`: `baton serve`, whose worker computes
nothing."""

import sys

from rich.console import Console

from deploy.commands.defaults import BUNDLED_MODEL
from deploy.commands.serve import run
from deploy.local.deployment import Deployment
from deploy.local.nursery import Nursery
from deploy.logs import configure_logging
from engine.clock import MonotonicClock
from engine.config import Config, GatewayConfig, PoolsConfig
from tests.kits.services.null_workers import NullWorkers


def main() -> None:
    configure_logging("warning", MonotonicClock())
    drain_s, pace_s = map(float, sys.argv[1:])
    gateway = GatewayConfig(port=0, drain_timeout_s=drain_s)
    config = Config(gateway=gateway, pools=PoolsConfig(mixed=1))
    launcher = NullWorkers(Nursery(), pace_s)
    sys.exit(run(Deployment(launcher, model=BUNDLED_MODEL, config=config), Console(stderr=True)))


if __name__ == "__main__":
    main()

"""`python -m tests.kits.services.lent_nursery PORT …`: `baton …` with a nursery that tests lend.

That nursery has imported torch already. One of its own would take eight CPU seconds for that.
"""

import sys

from deploy.local import launcher
from deploy.local.nursery_port import DistantNursery


class LentNursery(DistantNursery):
    """Stands in for the launcher's own nursery. Its owner opens and closes it."""

    num_lost = 0

    def open(self, *kinds: str) -> None:
        """Leaves the nursery alone."""

    def close(self) -> None:
        """Leaves the nursery alone."""


if __name__ == "__main__":
    from deploy.commands.main import main  # others import this file for its class

    port = sys.argv.pop(1)
    launcher.Nursery = lambda: LentNursery(port)  # type: ignore[assignment,misc]
    main()

"""`python -m tests.kits.services.lent_nursery PORT …`: `baton …` with a nursery of the test.

The nursery has already imported torch. A new nursery would need eight CPU seconds for the import.
"""

import sys

from deploy.local import launcher
from deploy.local.nursery_port import DistantNursery


class LentNursery(DistantNursery):
    """Stands in for the launcher's own nursery. The owning test opens and closes it."""

    num_lost = 0

    def open(self, *kinds: str) -> None:
        """Does nothing: the owner has opened the nursery."""

    def close(self) -> None:
        """Does nothing: the owner closes the nursery."""


if __name__ == "__main__":
    # imported late, because other modules import this file for its class
    from deploy.commands.main import main

    port = sys.argv.pop(1)
    launcher.Nursery = lambda: LentNursery(port)  # type: ignore[assignment,misc]
    main()

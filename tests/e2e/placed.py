"""Services as processes in network namespaces."""

from collections.abc import Callable

from deploy.launcher import ProcessLauncher, ServiceProcess
from deploy.nursery import Child, Nursery
from tests.e2e.netns import Namespace, inside


class PlacedNursery(Nursery):
    """Whoever is forked is where the nursery was started."""

    def __init__(self, place: Namespace) -> None:
        super().__init__()
        self._place = place

    def fork(self, kind: str) -> Child:
        with inside(self._place):
            return super().fork(kind)


class PlacedProcesses(ProcessLauncher):
    """Runs each service in the namespace that `place_of` its name is."""

    def __init__(self, place_of: Callable[[str], Namespace]) -> None:
        super().__init__()
        self.place_of = place_of
        self._nurseries: dict[str, Nursery] = {}

    def close(self) -> None:
        super().close()
        for nursery in self._nurseries.values():
            nursery.close()

    def _service(self, name: str, kind: str) -> ServiceProcess:
        place = self.place_of(name)
        nursery = self._nurseries.setdefault(place.name, PlacedNursery(place))
        return ServiceProcess(name, kind, nursery)

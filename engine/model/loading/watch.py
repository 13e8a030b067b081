"""Observes which modules run in a pass, and whose weights other modules read.

Most code calls a module, which then uses its own weights. Some code reads the weights of another
module (`F.linear(x, self.classifier.weight)`, experts that slice their child's matrices). The
module that is read cannot be replaced by one without weights. Nor can its weights be widened only
while it runs. Some parts of a model never run on text.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


@dataclass(slots=True)
class Watched:
    """The modules that ran, and the modules whose weights were read from outside."""

    ran: set[nn.Module] = field(default_factory=set)
    read: set[nn.Module] = field(default_factory=set)  # weights read while the module did not run


@contextmanager
def watching(model: nn.Module, on_read: Callable[[nn.Module], None]) -> Iterator[Watched]:
    """Returns a context that records what passes do. It calls `on_read` once for each module that
    is read, before the read.
    """
    seen = Watched()
    running: list[nn.Module] = []
    members = set(model.modules())
    getattribute = nn.Module.__getattr__

    def noticed(module: nn.Module, name: str) -> object:
        value = getattribute(module, name)
        is_read = isinstance(value, nn.Parameter) and running and module not in running
        if is_read and module in members and module not in seen.read:
            seen.read.add(module)
            on_read(module)
        return value

    def before(module: nn.Module, _args: object) -> None:
        seen.ran.add(module)
        running.append(module)

    def after(_module: nn.Module, _args: object, _output: object) -> None:
        running.pop()

    handles = (
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after, always_call=True),
    )
    nn.Module.__getattr__ = noticed
    try:
        yield seen
    finally:
        nn.Module.__getattr__ = getattribute
        for handle in handles:
            handle.remove()


def names_like(model: nn.Module, modules: set[nn.Module]) -> frozenset[str]:
    """Returns the names of `modules`, and all names that differ from them only in numbers.

    A pass of a few tokens reads only the experts of these tokens; in service the other experts are
    read as well.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    alike = {_numberless(name) for name, module in named.items() if module in modules}
    return frozenset(name for name in named if _numberless(name) in alike)


def _numberless(name: str) -> str:
    return re.sub(r"\d+", "0", name)

import builtins

import pytest

from bench.common.plots import require_matplotlib
from engine.errors import ConfigError


def test_a_missing_matplotlib_is_an_error_that_says_what_to_install(monkeypatch):
    real_import = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[bench\]'"):
        require_matplotlib()

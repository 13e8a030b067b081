import builtins

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.common.plots import cdf, require_matplotlib
from engine.errors import ConfigError

FEW = settings(max_examples=20)  # a unit test has 50 ms


@FEW
@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_cdf_rises_to_one_over_the_sorted_values(values):
    latencies, shares = cdf(values)
    assert latencies == sorted(values)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_a_missing_matplotlib_is_an_error_that_says_what_to_install(monkeypatch):
    real_import = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ConfigError, match=r"pip install 'baton-serve\[bench\]'"):
        require_matplotlib()

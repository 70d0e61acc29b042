"""Settings of every test run: property tests draw the same examples each time and are not timed on a busy machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.models_fixture import Loaded

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Return a loader of the models of tests/models_fixture.py by name; each is built and loaded once per run."""
    from artifact.engine import models
    from tests.models_fixture import Loaded, saved

    folder = tmp_path_factory.mktemp("tiny")
    ready: dict[str, Loaded] = {}

    def get(name: str) -> Loaded:
        if name not in ready:
            model, path = saved(name, folder)
            ready[name] = Loaded(model, path, models.load(str(path)))
        return ready[name]

    return get


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run a module on one thread: on tiny models, waking others costs more than they compute.

    That results do not depend on the number of threads is what tests/test_determinism.py shows.
    """
    import numba
    import torch

    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(1)
    numba.set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])

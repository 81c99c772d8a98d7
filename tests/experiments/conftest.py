"""Experiments on data on which they take seconds, run as a user runs them."""

import warnings

import pytest
from small import use_small_data

from cdeq import cli


@pytest.fixture(autouse=True)
def _small_data(monkeypatch):
    use_small_data(monkeypatch)


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory):
    """`reproduced(experiment, ...)` runs it once for all tests; the folder with `results` and `runs`."""
    place, done = tmp_path_factory.mktemp("reproduced"), set()

    def run(experiment, *more):
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            # So few updates do not make a teacher that converges.
            warnings.filterwarnings("ignore", message=".*recorded equilibria")
            use_small_data(patch)
            patch.chdir(place)
            if (experiment, more) not in done:
                assert cli.main(["reproduce", experiment, "--scale", "tiny", *more]) == 0
                done.add((experiment, more))
        return place

    return run

"""Solver time and the boundary coefficients, against the paper's formulas."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdeq.consistency.boundary import out_coefficient, skip_coefficient
from cdeq.consistency.clock import TIME_MAPS, inference_fraction, solver_time
from teachers import Tanh, untrained

FORMULAS = {
    "exponential": lambda k, K, rho: 1 - math.e ** (-rho * k),
    "linear": lambda k, K, rho: k / K,
    "cosine": lambda k, K, rho: 1 - math.cos(k * math.pi / (2 * K)),
}
intervals = st.tuples(st.floats(0, 10), st.floats(0.01, 10)).map(lambda p: (p[0], p[0] + p[1]))


@pytest.mark.parametrize("name", FORMULAS)
def test_time_maps_are_the_papers(name):
    for k in range(13):
        expected = FORMULAS[name](k, 12, 0.1)
        assert TIME_MAPS[name](k, 12, 0.1) == pytest.approx(expected, abs=1e-15)


def test_every_time_map_is_tested():
    assert set(TIME_MAPS) == set(FORMULAS)


def test_numbers_by_hand():
    assert TIME_MAPS["exponential"](10, 99, 0.1) == pytest.approx(1 - 1 / math.e)
    assert TIME_MAPS["cosine"](1, 2, 0.1) == pytest.approx(1 - math.sqrt(0.5))
    assert [inference_fraction(j, 0.9) for j in range(3)] == pytest.approx([0, 0.1, 0.19])
    assert solver_time(0.25, 1.0, 3.0) == 1.5
    assert skip_coefficient(1.5, gamma=2, eps=1.0, end=3.0) == pytest.approx(1 / 16)


@given(
    name=st.sampled_from(sorted(TIME_MAPS)),
    steps=st.integers(2, 40),
    rho=st.floats(0.01, 0.4),
    interval=intervals,
)
def test_solver_time_rises_from_eps_and_stays_before_the_end(name, steps, rho, interval):
    eps, end = interval
    times = [
        solver_time(TIME_MAPS[name](k, steps, rho), eps, end) for k in range(steps)
    ]  # the last state of the linear and cosine maps stands at T itself
    assert times[0] == eps
    assert all(a < b for a, b in pairwise(times))
    assert all(eps <= t < end for t in times)
    assert TIME_MAPS[name](steps, steps, rho) <= 1


@given(fraction=st.floats(0, 1), gamma=st.floats(0.2, 8), interval=intervals)
def test_coefficients_add_up_to_one(fraction, gamma, interval):
    eps, end = interval
    t = min(solver_time(fraction, eps, end), end)
    skip = skip_coefficient(t, gamma=gamma, eps=eps, end=end)
    out = out_coefficient(t, gamma=gamma, eps=eps, end=end)
    assert 0 <= skip <= 1
    assert skip + out == 1
    assert skip == pytest.approx(((t - eps) / (end - eps)) ** gamma)


@given(gamma=st.floats(0.2, 8), interval=intervals)
def test_boundary_values(gamma, interval):
    eps, end = interval
    assert skip_coefficient(eps, gamma=gamma, eps=eps, end=end) == 0
    assert out_coefficient(eps, gamma=gamma, eps=eps, end=end) == 1
    assert skip_coefficient(end, gamma=gamma, eps=eps, end=end) == 1
    assert out_coefficient(end, gamma=gamma, eps=eps, end=end) == 0


@given(first=st.floats(0, 1), second=st.floats(0, 1), gamma=st.floats(0.2, 8), interval=intervals)
def test_the_students_share_never_grows(first, second, gamma, interval):
    eps, end = interval
    early, late = sorted(solver_time(f, eps, end) for f in (first, second))
    settings = {"gamma": gamma, "eps": eps, "end": end}
    assert out_coefficient(early, **settings) >= out_coefficient(late, **settings)


@given(decay=st.floats(0.05, 0.95))
def test_inference_schedule(decay):
    fractions = [inference_fraction(j, decay) for j in range(12)]
    assert fractions[0] == 0
    assert all(a < b < 1 for a, b in pairwise(fractions))
    for j, fraction in enumerate(fractions):
        assert 1 - fraction == pytest.approx(decay**j)


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_a_student_keeps_this_clock(gamma):
    student = untrained(Tanh(), recipe="paper", eps=0.5, end=2.0, gamma=gamma)
    for j in range(30):
        t = 0.5 + (1 - 0.9**j) * 1.5
        point = student.time_point(j)
        assert point.time == pytest.approx(t)
        assert point.strength == pytest.approx(1 - ((t - 0.5) / 1.5) ** gamma)
    assert student.time_point(1000).strength == 0

"""A view shows of a constant what NumPy makes of it by the same steps, whatever they are."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from lut4tool.recognize.view import beside, broadcast, view_of


def shape_of(size: int, draw: random.Random) -> tuple[int, ...]:
    """A random shape of so many elements."""
    shape = []
    for _ in range(draw.randrange(4)):
        shape.append(draw.choice([part for part in range(1, size + 1) if size % part == 0]))
        size //= shape[-1]
    return (*shape, size)


@pytest.mark.parametrize("seed", range(300))
def test_steps_at_random(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.choice([24, 48, 60, 96])
    shape, flat = shape_of(size, draw), np.arange(size)
    view, array = view_of(shape), flat.reshape(shape)
    for _ in range(draw.randrange(1, 9)):
        axis = draw.randrange(array.ndim)
        match draw.randrange(6):
            case 0:
                wanted = shape_of(array.size, draw)
                moved = view.reshaped(wanted)
                if moved is not None:
                    view, array = moved, array.reshape(wanted)
            case 1:
                perm = draw.sample(range(array.ndim), array.ndim)
                view, array = view.transposed(perm), array.transpose(perm)
            case 2:
                view, array = view.with_axis(axis), np.expand_dims(array, axis)
            case 3:
                wanted = tuple(n if n > 1 or array.size > 500 else draw.randrange(1, 4) for n in array.shape)
                moved = view.expanded(wanted)
                assert moved is not None
                view, array = moved, np.broadcast_to(array, wanted)
            case 4:
                end = draw.randrange(1, array.shape[axis] + 1)
                view, array = view.cut(axis, end), array[(slice(None),) * axis + (slice(end),)]
            case 5:
                times = 2 if array.size < 500 else 1
                end = draw.randrange(1, times * array.shape[axis] + 1)
                array = np.repeat(array, times, axis)[(slice(None),) * axis + (slice(end),)]
                view = view.stretched(axis, times, end)
        assert view.shape == array.shape
        np.testing.assert_array_equal(view.taken(flat), array)
    for axis in range(array.ndim):
        run = array.shape[axis] if view.repeats(axis) else view.run(axis)
        for part in (part for part in range(1, run + 1) if run % part == 0):
            np.testing.assert_array_equal(
                view.first_of_runs(axis, part).taken(flat), np.take(array, range(0, array.shape[axis], part), axis)
            )


@pytest.mark.parametrize("perm", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_a_view_of_some_units(perm: tuple[int, int, int]) -> None:
    array = np.arange(4 * 5 * 6).reshape(4, 5, 6)
    for axis in range(3):
        place = perm.index(axis)
        view = view_of(array.shape).transposed(perm)
        some = np.take(array, range(2), axis)
        shown = view.of_units(place, 2).taken(some.reshape(-1))
        np.testing.assert_array_equal(shown, some.transpose(perm))


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("starts", [(0, 1), (1, 0)])
def test_two_views_side_by_side(axis: int, starts: tuple[int, int]) -> None:
    flat = np.arange(48)
    halves = [view_of((4, 3, 2), 2)._replace(start=start) for start in starts]
    both = beside(*halves, axis)
    assert both is not None
    np.testing.assert_array_equal(both.taken(flat), np.concatenate([half.taken(flat) for half in halves], axis))


def test_what_has_no_view() -> None:
    turned = view_of((4, 6)).transposed((1, 0))
    assert turned.reshaped((4, 6)) is None  # 4 of its 6 are no dimension
    assert turned.reshaped((3, 2, 4)) == turned.reshaped((6, 4)).reshaped((3, 2, 4))
    assert view_of((4, 6)).cut(1, 5).reshaped((20,)) is not None  # one factor is cut for good
    assert view_of((4, 6)).transposed((1, 0)).reshaped((2, 3, 4)).transposed((1, 0, 2)).reshaped((6, 4)) is not None
    assert view_of((4, 6)).reshaped((25,)) is None
    assert view_of((4, 6)).expanded((4, 5)) is None
    assert view_of((4, 6)).expanded((6,)) is None
    assert beside(view_of((4,)), view_of((2, 2)), 0) is None
    assert broadcast((2, 3), (4, 3)) is None
    assert broadcast((2, 1), (3,)) == (2, 3)
    assert math.prod(broadcast((), (1,))) == 1

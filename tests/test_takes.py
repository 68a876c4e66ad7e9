"""What a loss takes, by the names of its parameters."""

import functools

import pytest

from mixfl.losses import Takes, takes


class Wrapper:
    takes = Takes(key=True)

    def __call__(self, *args): ...


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda params, batch: 0, Takes()),
        (lambda params: 0, Takes()),
        (lambda params, batch, key: 0, Takes(key=True)),
        (lambda x, b, rng: 0, Takes(key=True)),
        (lambda params, batch, frozen: 0, Takes(frozen=True)),
        (lambda params, batch, frozen, key: 0, Takes(True, True)),
        (lambda params, batch, key, frozen: 0, Takes(True, True)),
        (lambda params, batch, *, state, frozen: 0, Takes(False, True, True)),
        (lambda params, frozen: 0, Takes(frozen=True)),
        (lambda params, batch, table=None: 0, Takes()),
        (lambda params, batch, key=None: 0, Takes(key=True)),
        (functools.partial(lambda params, batch, frozen: 0, frozen=1), Takes()),
        (lambda params, *batch: 0, Takes()),
        (max, Takes()),
        (Wrapper(), Takes(key=True)),
    ],
)
def test_takes(loss, expected):
    assert takes(loss) == expected

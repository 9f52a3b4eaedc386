from __future__ import annotations

import pytest

from pd_serve.engine.philox import philox4x32, uniform

_ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    # Random123 1.14, tests/kat_vectors, philox4x32 with 10 rounds.
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((_ONES,) * 4, (_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert philox4x32(counter, key) == expected


def test_uniforms_are_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(7, position) for position in range(4000)], [uniform(seed, 7) for seed in range(4000)]):
        assert all(0 <= number < 1 for number in numbers)
        counts = [sum(index <= number * 8 < index + 1 for number in numbers) for index in range(8)]
        # Chi-squared with 7 degrees of freedom: above 29.9 once in ten thousand; the numbers are fixed.
        assert sum((count - 500) ** 2 / 500 for count in counts) < 29.9
        assert len(set(numbers)) == 4000


def test_seeds_count_modulo_two_to_the_64() -> None:
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
    assert uniform(1, 3) != uniform(1 + 2**32, 3)

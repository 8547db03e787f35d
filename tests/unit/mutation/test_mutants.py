"""Mutations are found and made where the code allows them."""

from __future__ import annotations

import pytest

from tests.mutation.mutants import apply, find_sites, sample

SOURCE = '''
LIMIT = 3 + 1

def f(a, b):
    """Docstring."""
    if a < b and not a:
        log(a)
    return True
'''


def test_every_mutation_changes_one_place_of_a_function() -> None:
    sites = find_sites("m.py", SOURCE)
    assert {(site.before, site.after) for site in sites} == {
        ("a < b and (not a)", "a < b or not a"),
        ("a < b", "a <= b"),
        ("not a", "a"),
        ("log(a)", "pass"),
        ("True", "False"),
    }
    whole = apply(SOURCE, sites[0])
    for site in sites:
        mutated = apply(SOURCE, site)
        assert site.after.replace("(", "").replace(")", "") in mutated.replace("(", "").replace(
            ")", ""
        )
        assert "LIMIT = 3 + 1" in mutated
    assert whole != SOURCE


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_gives_one_sample_that_takes_modules_in_turn(seed: int) -> None:
    sites = {name: find_sites(name, SOURCE) for name in ("a.py", "b.py")}
    drawn = sample(sites, 4, seed)
    assert drawn == sample(sites, 4, seed)
    assert [site.module for site in drawn] == ["a.py", "b.py", "a.py", "b.py"]
    assert len(sample(sites, 99, seed)) == 10

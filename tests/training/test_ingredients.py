"""The design and the statistics behind the table of ingredients."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def ingredients(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ingredients

    return ingredients


def test_main_effects_are_told_apart(ingredients: ModuleType):
    design = ingredients.design()
    assert design.shape == (12, len(ingredients.LEFT_OUT))
    assert np.array_equal(design.T @ design, 12 * np.eye(11)) and not design.sum(0).any()
    assert sorted((design > 0).sum(1)) == [0, *[6] * 11]


def test_margin_of_error_is_that_of_lenth(ingredients: ModuleType):
    effects = np.array([0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, 9.0, -9.0])
    # Median size 0.5; below 2.5 * 0.75 are the first seven, of median 0.4. t(0.975, 3 degrees of freedom) is 3.182.
    assert ingredients.margin_of_error(effects) == pytest.approx(3.1824 * 1.5 * 0.4, rel=1e-4)


def test_every_ingredient_changes_the_recipe(ingredients: ModuleType):
    recipe = ingredients.broaden()
    same = [name for name, leave_out in ingredients.LEFT_OUT.items() if leave_out(recipe) == recipe]
    assert same == [ingredients.SYNTHETIC, ingredients.DROPOUT]  # these are of corpus and network

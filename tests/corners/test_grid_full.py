"The whole product of optimizers, ways to train and loaders, of which tests/promise/test_grid.py takes some"
from itertools import product
import pytest
from test_grid import cases,check,fits,opts,some,warns

@warns
@pytest.mark.parametrize('opt,fit,case', [o for o in product(opts, fits, cases) if o not in some])
def test_whole_grid(opt, fit, case): check(opt, fit, case)

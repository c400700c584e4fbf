"""The grid of the promise: optimizers, ways to train, and loaders, all compared with the large batch. A sample is
drawn; `make sweep` runs the whole product."""
import pytest
from dataclasses import dataclass
from functools import partial
from harness import *

opts = dict(sgd=SGD, momentum=partial(SGD, mom=0.9), adam=Adam, radam=RAdam, qhadam=QHAdam, lamb=Lamb, larc=Larc,
            rmsprop=RMSProp, ranger=ranger,
            torch_adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
            torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD))

fits = dict(fit=lambda l: l.fit(3), one_cycle=lambda l: l.fit_one_cycle(3), flat_cos=lambda l: l.fit_flat_cos(3),
            sgdr=lambda l: l.fit_sgdr(2, 1), fine_tune=lambda l: l.fine_tune(2, base_lr=0.02))

@dataclass
class Case:
    "A training set of `n` samples, a window, and the batch that it stands for"
    n:int; bs:int; large:int; window:dict; drop_last:bool=False; skip:tuple=(); windows:int=None

cases = dict(
    fits          = Case( 96,  8, 32, dict(n_step=4), windows=3),
    tail          = Case( 80,  8, 32, dict(n_step=4), windows=3),
    smaller_last  = Case( 92,  8, 32, dict(n_step=4), windows=3),
    tail_smaller  = Case( 76,  8, 32, dict(n_step=4), windows=3),
    n_samples     = Case(200, 24, 72, dict(n_samples=64), windows=3),
    n_samples_fit = Case( 92,  8, 32, dict(n_samples=32), windows=3),
    long_window   = Case( 40,  8, 64, dict(n_step=8), windows=1),
    n_step_1      = Case( 76, 32, 32, dict(n_step=1), windows=3),
    drops         = Case(124,  8, 32, dict(n_step=4), drop_last=True, windows=3),
    shorter       = Case( 92,  8, 32, dict(n_step=4), skip=(3,14,15,33,60,61,62,63), windows=3),
    much_shorter  = Case( 92,  8, 32, dict(n_step=4), skip=tuple(range(0,60,2)), windows=2),
)

def check(opt, fit, case):
    "One point of the grid"
    c = cases[case]
    def train(bs, cbs):
        learn = make_learner(make_dls(c.n, bs, drop_last=c.drop_last, skip=c.skip), opt_func=opts[opt], cbs=cbs)
        fits[fit](learn)
        return learn
    big,acc = train(c.large, None),train(c.bs, AccumulateStep(**c.window))
    assert_same(acc, big)
    assert acc.train_iter==c.windows*acc.n_epoch
    n = acc.accumulate_step.counts
    assert n.n_steps==acc.train_iter and n.n_samples==n.n_stepped+n.n_thrown==sum(n.sizes)+n.n_thrown
    if not c.drop_last: assert n.n_thrown==0

@each(60, opt=opts, fit=fits, case=cases)
@pytest.mark.filterwarnings('ignore:AccumulateStep.*a window of 8 micro-batches is more')
def test_grid(opt, fit, case): check(opt, fit, case)

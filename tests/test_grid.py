"""The grid of the promise: optimizers, ways to train, and loaders, all compared with the large batch. A sample is
drawn; `make sweep` runs the whole product."""
import pytest
from functools import partial
from harness import *

opts = dict(sgd=SGD, momentum=partial(SGD, mom=0.9), adam=Adam, radam=RAdam, qhadam=QHAdam, lamb=Lamb, larc=Larc,
            rmsprop=RMSProp, ranger=ranger, torch_adamw=partial(OptimWrapper, opt=torch.optim.AdamW),
            torch_sgd=partial(OptimWrapper, opt=torch.optim.SGD))
fits = dict(fit=lambda l: l.fit(3), one_cycle=lambda l: l.fit_one_cycle(3), flat_cos=lambda l: l.fit_flat_cos(3),
            sgdr=lambda l: l.fit_sgdr(2, 1), fine_tune=lambda l: l.fine_tune(2, base_lr=0.02))

four = dict(n_step=4)
cases = dict(   # samples, batch size, the batch that a window stands for, windows of an epoch, a window, the loader
    fits          = ( 96,  8, 32, 3, four),
    tail          = ( 80,  8, 32, 3, four),
    smaller_last  = ( 92,  8, 32, 3, four),
    tail_smaller  = ( 76,  8, 32, 3, four),
    n_samples     = (200, 24, 72, 3, dict(n_samples=64)),
    n_samples_fit = ( 92,  8, 32, 3, dict(n_samples=32)),
    long_window   = ( 40,  8, 64, 1, dict(n_step=8)),
    n_step_1      = ( 76, 32, 32, 3, dict(n_step=1)),
    drops         = (124,  8, 32, 3, four, dict(drop_last=True)),
    shorter       = ( 92,  8, 32, 3, four, dict(skip=(3,14,15,33,60,61,62,63))),
    much_shorter  = ( 92,  8, 32, 2, four, dict(skip=tuple(range(0,60,2)))),
    ends_early    = ( 92,  8, 32, 1, four, dict(skip=tuple(range(0,60,2)), drop_last=True)))   # in its second window

def check(opt, fit, case):
    "One point of the grid"
    n,bs,large,windows,window,*more = cases[case]
    acc,_ = same(lambda: AccumulateStep(**window), bs, large, n, fits[fit], opt_func=opts[opt],
                 **{**dict(shuffle=True), **dict(*more)})
    assert acc.train_iter==windows*acc.n_epoch
    n = acc.accumulate_step.counts
    assert n.n_steps==acc.train_iter and n.n_samples==n.n_stepped+n.n_thrown==sum(n.sizes)+n.n_thrown
    assert bool(n.n_thrown)==(case in ('drops','ends_early'))

@each(60, opt=opts, fit=fits, case=cases)
@pytest.mark.filterwarnings('ignore:AccumulateStep.*a window of 8 micro-batches is more')
def test_grid(opt, fit, case): check(opt, fit, case)

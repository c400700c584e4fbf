"The `lr_find` curve of the large batch, by callback and by patch, and a learner that is as it was"
import matplotlib
from contextlib import nullcontext
from dataclasses import dataclass
from nets import *
matplotlib.use('Agg')

suggest = [valley,slide,minimum,steep]

def weighted(): return nn.CrossEntropyLoss(weight=tensor([1.,20.,5.]).double(), ignore_index=1)

@dataclass
class Case:
    "A training set of `n` samples, a window, the batch that it stands for, and how far to go"
    n:int; window:dict; large:int=32; bs:int=8; num_it:int=40; end_lr:float=10; drop_last:bool=False; skip:tuple=()
    loss:object=nn.CrossEntropyLoss; opt:object=Adam

cases = dict(
    drops     = Case(100, dict(n_step=4), drop_last=True),
    n_samples = Case(200, dict(n_samples=64), large=72, bs=24),
    shorter   = Case( 92, dict(n_step=4), skip=tuple(range(10,22))),
    one_epoch = Case(640, dict(n_step=4), num_it=20),                     # ends in the middle of the first epoch
    short     = Case( 24, dict(n_step=8), large=64),                      # epochs shorter than a window
    diverges  = Case( 76, dict(n_step=4), end_lr=1e4, opt=SGD),
    weighted  = Case( 76, dict(n_step=4), loss=weighted, num_it=60),
    few       = Case( 76, dict(n_step=4), num_it=6),
    schedule  = Case( 96, dict(n_step=lambda pct: 4 if pct==0 else 5)),   # the value at the beginning counts
)

def find(learn, case):
    "Suggestions, rates, losses, and the lines of the plot"
    plt.close('all')
    res = learn.lr_find(num_it=case.num_it, end_lr=case.end_lr, suggest_funcs=suggest if case.num_it>30 else None)
    return res,learn.recorder.lrs,learn.recorder.losses,[l.get_xydata() for l in plt.gca().lines]

def curve(nm, how, tmp_path):
    "The large batch's rates, losses, plot, suggestions and steps, and again; then a fit as on a fresh learner"
    c = cases[nm]
    def learner(bs, cbs=None):
        dls = make_dls(c.n, bs, drop_last=c.drop_last, skip=c.skip, shuffle=False)
        return make_learner(dls, cbs=cbs, path=tmp_path, loss_func=c.loss(), opt_func=c.opt)
    a = learner(c.bs, AccumulateStep(**c.window) if how=='callback' else None)
    b,fresh = learner(c.large),learner(c.large)
    old,loss,state = deepcopy(a.model.state_dict()),a.loss_func,dict(vars(a.loss_func))
    rb,lrs,lb,pb = find(b, c)
    fresh.fit_one_cycle(2)
    with accumulation(**c.window) if how=='patch' else nullcontext():
        for again in False,True:
            ra,*now,pa = find(a, c)
            if again: assert now==first
            first,la = now,now[1]
            assert ra==rb and now[0]==lrs and rel([o[:,0] for o in pa], [o[:,0] for o in pb])[0]==0
            k = len(lb)*4//5
            err = rel(la[:k], lb[:k])[0],rel(la, lb)[0],rel([o[:,1] for o in pa], [o[:,1] for o in pb])[0]
            assert err[0]<=TOL and err[1]<=1e-8 and err[2]<=TOL32, err   # matplotlib draws fastai's losses in float32
            assert len(a.spy.steps)==len(b.spy.steps) and (len(b.spy.steps)==c.num_it)==(nm!='diverges')
            a.spy.steps = []
            assert all(torch.equal(v.cpu(), old[k]) for k,v in a.model.state_dict().items())
            assert not any(v for d in a.opt.state_dict()['state'] for k,v in d.items()
                           if k not in ('do_wd','force_train')), 'the optimizer has a state'
            is_clean(a)
            assert a.loss_func is loss and dict(vars(loss))==state and not hasattr(a, 'lr_finder')
            assert any(isinstance(cb, AccumulateStep) for cb in a.cbs)==(how=='callback')
        if nm=='schedule': return   # whose fit has other windows
        a.fit_one_cycle(2)
    assert_same(a, fresh)

@each(10, nm=cases, how=['callback','patch'])
@pytest.mark.filterwarnings('ignore:AccumulateStep.*a window of 8 micro-batches is more')
def test_curve(nm, how, tmp_path): curve(nm, how, tmp_path)

def test_in_a_fit(tmp_path):
    "`fit` keeps the epochs that it was asked for, and `lr_find` gets as many as it needs"
    def epochs(n, num_it, bs, cbs=None):
        learn = make_learner(make_dls(64, bs), cbs=cbs, path=tmp_path)
        learn.fit(n, cbs=LRFinder(num_it=num_it, stop_div=False))
        return learn.n_epoch,len(learn.spy.steps)
    assert epochs(5, 100, 8, AccumulateStep(4))==epochs(5, 100, 32)==(5,10)

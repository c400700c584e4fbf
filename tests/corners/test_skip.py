"A micro-batch that is left out: as if the loader of the large batch had never had its samples"
import pytest
from harness import *
from fastai_accum.extras.skip import *

N,BS = 76,8
micros = [list(range(i, min(i+BS,N))) for i in range(0,N,BS)]

class Batches:
    "Batches of given samples"
    def __init__(self, parts, x, y): self.parts,self.x,self.y = parts,x,y
    def __len__(self): return len(self.parts)
    def __getitem__(self, i): return self.x[self.parts[i]],self.y[self.parts[i]]

def large(left_out, cbs=None, **kwargs):
    "A learner whose batches are the windows of four without those that are left out"
    def window(i): return sum((micros[j] for j in range(i, min(i+4,len(micros))) if j not in left_out), [])
    windows = [window(i) for i in range(0,len(micros),4)]
    learn = make_learner(make_dls(N, 32, shuffle=False), cbs=cbs, **kwargs)
    dl = DataLoader(Batches([w for w in windows if w], features(N), classes(N)), bs=None)
    learn.dls = DataLoaders(dl, learn.dls.valid)
    return learn

def dropper(left_out, event, order=0):
    def f(cb):
        if cb.training and cb.micro.i in left_out: raise CancelBatchException
    cb = Callback(**{event:f}); cb.order = order
    return cb

@pytest.mark.parametrize('order', [-1000,0,1000])
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','before_backward'])
@pytest.mark.parametrize('left_out', [{0}, {1,2}, {3}, {1,3,4,5}, {9}, {0,1,2,7,8}], ids=str)
def test_left_out(left_out, event, order):
    "At every event before the backward pass, at any order, inside a window and at its boundary"
    a = make_learner(make_dls(N, BS, shuffle=False), cbs=[AccumulateStep(4), dropper(left_out, event, order)])
    b = large(left_out)
    for l in (a,b): l.fit_one_cycle(2)
    assert_same(a, b)
    n,lost = a.accumulate_step.counts,sum(len(micros[i]) for i in left_out)*2
    assert (n.n_samples,n.n_stepped,n.n_thrown)==(2*N, 2*N-lost, lost)

@pytest.mark.parametrize('left_out', [{0,1,2,3}, {4,5,6,7}, {8,9}, set(range(10))], ids=str)
def test_whole_windows(left_out):
    "A window of which nothing is left makes no step; the schedule moves on"
    cbs = [AccumulateStep(4), dropper(left_out, 'after_loss')]
    a = make_learner(make_dls(N, BS, shuffle=False), cbs=cbs, opt_func=SGD)
    none = len(left_out)==len(micros)
    old = [p.clone() for p in a.model.parameters()]
    a.fit(2)
    if none: assert all(torch.equal(p,o) for p,o in zip(a.model.parameters(), old))
    else:
        b = large(left_out, opt_func=SGD); b.fit(2)
        assert rel(snapshot(a)['params'], snapshot(b)['params'])[0]<=TOL
    assert a.accumulate_step.counts.n_steps==(0 if none else 4) and len(a.accumulate_step.counts.sizes)==6
    assert a.pct_train==pytest.approx(1)

def test_counting_samples():
    "With `n_samples`, what is left out fills its window too"
    cbs = [AccumulateStep(n_samples=32), dropper({1,3}, 'after_loss')]
    a = make_learner(make_dls(96, BS, shuffle=False), cbs=cbs, opt_func=SGD)
    a.fit(1)
    n = a.accumulate_step.counts
    assert (n.n_steps,n.n_stepped,n.n_thrown)==(3,80,16)

def test_train_metrics():
    "Metrics over the training set do not count it"
    cbs = [AccumulateStep(4), dropper({2,3,9}, 'after_loss')]
    a = make_learner(make_dls(N, BS, shuffle=False), cbs=cbs, metrics=accuracy)
    b = large({2,3,9}, metrics=accuracy)
    for l in (a,b): l.recorder.train_metrics = True; l.fit(1)
    assert_same(a, b, but=('values','final_record'))
    assert rel(a.recorder.values, b.recorder.values)[0]<1e-6   # fastai's accuracy is a float32 mean

def nan_at(which, value=math.nan):
    x = features(N).clone()
    for i in which: x[micros[i][0]] = value
    return x

def messages(rec): return [str(o.message) for o in rec if 'SkipNonFinite' in str(o.message)]

@pytest.mark.parametrize('value', [math.nan, 1e400], ids=['nan','inf'])
@pytest.mark.parametrize('which', [{0}, {3}, {1,2,9}, {4,5,6}], ids=str)
def test_skip_non_finite(which, value):
    "Trains on the rest exactly, and warns once; other callbacks do not see the NaN"
    dls = make_dls(N, BS, shuffle=False, x=nan_at(which, value)); dls.valid.dataset.x = features(24)
    a = make_learner(dls, cbs=[AccumulateStep(4), SkipNonFinite(), TerminateOnNaNCallback()], opt_func=SGD)
    b = large(which, opt_func=SGD)
    with pytest.warns(UserWarning) as rec: a.fit(2)
    msg, = messages(rec)
    assert f'micro-batch {min(which)%4+1} of window {min(which)//4+1} in epoch 0 is left out' in msg
    b.fit(2)
    for k in 'params','opt','losses': assert rel(snapshot(a)[k], snapshot(b)[k])[0]<=TOL, k
    assert (a.skip_non_finite.n_micro,a.skip_non_finite.n_steps)==(2*len(which),0)

def test_without_it_plain():
    "Without it the NaN is fastai's: the window is lost, as the large batch would be"
    for bs,cbs in (BS,AccumulateStep(4)),(32,None):
        learn = make_learner(make_dls(N, bs, shuffle=False, x=nan_at({1})), cbs=cbs, opt_func=SGD)
        learn.fit(1)
        assert all(p.isnan().all() for p in learn.model[2].parameters())

def test_ignored_targets_are_no_error():
    "A micro-batch of which every target is ignored has a mean of NaN, and is not reported"
    y = classes(N); y[8:16] = -100
    a = make_learner(make_dls(N, BS, y=y, shuffle=False), cbs=[AccumulateStep(4),SkipNonFinite()])
    b = make_learner(make_dls(N, 32, y=y, shuffle=False))
    with warnings.catch_warnings(): warnings.filterwarnings('error', 'SkipNonFinite'); a.fit(2)
    b.fit(2)
    assert_same(a, b)
    assert a.skip_non_finite.n_micro==0

# ---- gradients

class Root(nn.Module):
    "Finite at 0, where its slope is infinite"
    def forward(self, x): return x.abs().sqrt()

def rooted(bs, cbs, blank=(), dtype=torch.float64, **kwargs):
    "Samples that are 0 have a finite loss, and a gradient that is NaN"
    x = features(N).to(dtype, copy=True)
    for i in blank: x[micros[i][0]] = 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6,5, bias=False), Root(), nn.Linear(5,3)).to(dtype)
    return make_learner(make_dls(N, bs, x=x, shuffle=False), model, cbs=cbs, **kwargs)

@pytest.mark.parametrize('opt', [SGD,Adam])
@pytest.mark.parametrize('cbs', [[], [GradientClip(.1)]], ids=['plain','clip'])
def test_skips_the_step(opt, cbs):
    "No NaN in weights or in the state of the optimizer: the same as with the large batch, whose step is skipped too"
    a = rooted(BS, [AccumulateStep(4), SkipNonFinite(), *deepcopy(cbs)], {5}, opt_func=opt)
    b = rooted(32, [AccumulateStep(1), SkipNonFinite(), *deepcopy(cbs)], {5}, opt_func=opt)
    for l in (a,b):
        with pytest.warns(UserWarning) as rec: l.fit(2)
        msg, = messages(rec)
        assert 'the step of window 2 in epoch 0 is skipped, because a gradient is NaN or infinite' in msg
    assert_same(a, b, but=['step.grads'])
    assert all(p.isfinite().all() for p in a.model.parameters())
    assert (a.skip_non_finite.n_micro,a.skip_non_finite.n_steps)==(0,2)
    n = a.accumulate_step.counts
    assert (n.n_steps,n.n_thrown)==(4,2*32) and n.sizes==[32,0,12]*2

def test_both_kinds():
    "A loss and a gradient that are not finite, in two windows: one warning each"
    dls = make_dls(N, BS, x=nan_at({1}), shuffle=False)
    def inf(cb):
        if cb.training and cb.micro.i==6: cb.learn.loss_grad = cb.learn.loss_grad*math.inf
    a = make_learner(dls, cbs=[AccumulateStep(4), SkipNonFinite(), Callback(after_loss=inf)])
    for _ in range(2):   # the counts are those of one fit
        with pytest.warns(UserWarning) as rec: a.fit(2)
        assert len(messages(rec))==2
        assert (a.skip_non_finite.n_micro,a.skip_non_finite.n_steps)==(2,2)
    assert all(p.isfinite().all() for p in a.model.parameters())

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16])
def test_scalers(dtype):
    "A scaler that overflows skips its own step and lowers its scale; one that is switched off leaves it to us"
    mp = OnCpu(dtype, init_scale=2.**20)
    learn = rooted(BS, [AccumulateStep(4), SkipNonFinite(), mp], {5}, torch.float32)
    with warnings.catch_warnings(record=True) as rec: warnings.simplefilter('always'); learn.fit(4)
    assert all(p.isfinite().all() for p in learn.model.parameters())
    if dtype is torch.float16: assert learn.skip_non_finite.n_steps==0 and not messages(rec)
    else: assert learn.skip_non_finite.n_steps==4 and len(messages(rec))==1

def test_sparse():
    "Sparse gradients are looked at as they are"
    class Bag(nn.Module):
        def __init__(self):
            super().__init__(); torch.manual_seed(0)
            self.emb,self.lin = nn.Embedding(20, 6, sparse=True),nn.Linear(6,3)
        def forward(self, x): return self.lin(self.emb(x).mean(1))
    x = torch.randint(20, (64,3), generator=torch.Generator().manual_seed(0))
    def inf(cb):
        if cb.training and cb.micro.i==6: cb.learn.loss_grad = cb.learn.loss_grad*math.inf
    cbs = [AccumulateStep(4), SkipNonFinite(), Callback(after_loss=inf)]
    learn = make_learner(make_dls(64, 8, x=x), Bag().double(), splitter=trainable_params, cbs=cbs,
                         opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    learn.remove_cb(Spy)
    with pytest.warns(UserWarning, match='is skipped'): learn.fit(1)
    assert learn.skip_non_finite.n_steps==1 and all(p.isfinite().all() for p in learn.model.parameters())

def test_needs_accumulate_step():
    learn = make_learner(make_dls(N, BS), cbs=SkipNonFinite())
    with pytest.raises(ValueError, match='the learner has no AccumulateStep'): learn.fit(1)
    learn.validate()   # trains nothing

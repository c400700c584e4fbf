"A micro-batch that is left out: as if the loader of the large batch had never had its samples"
import pytest
from harness import *
from fastai_accum.skip import *

N,BS = 76,8
micros = [list(range(i, min(i+BS,N))) for i in range(0,N,BS)]

class Batches:
    "Batches of given samples"
    def __init__(self, parts, x, y): self.parts,self.x,self.y = parts,x,y
    def __len__(self): return len(self.parts)
    def __getitem__(self, i): return self.x[self.parts[i]],self.y[self.parts[i]]

def large(left_out, cbs=None, **kwargs):
    "A learner whose batches are the windows of four without those that are left out"
    windows = [sum((micros[j] for j in range(i, min(i+4,len(micros))) if j not in left_out), []) for i in range(0,len(micros),4)]
    learn = make_learner(make_dls(N, 32, shuffle=False), cbs=cbs, **kwargs)
    learn.dls = DataLoaders(DataLoader(Batches([w for w in windows if w], features(N), classes(N)), bs=None), learn.dls.valid)
    return learn

def dropper(left_out, event, order=0):
    def f(cb):
        if cb.training and cb.micro.i in left_out: cb.accumulate_step.drop()
    cb = Callback(**{event:f}); cb.order = order
    return cb

@pytest.mark.parametrize('order', [-1000,0,1000])
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','before_backward'])
@pytest.mark.parametrize('left_out', [{0}, {1,2}, {3}, {1,3,4,5}, {9}, {0,1,2,7,8}], ids=str)
def test_drop(left_out, event, order):
    "At every event before the backward pass, at any order, inside a window and at its boundary"
    a = make_learner(make_dls(N, BS, shuffle=False), cbs=[AccumulateStep(4), dropper(left_out, event, order)])
    b = large(left_out)
    for l in (a,b): l.fit_one_cycle(2)
    assert_same(a, b)
    n,lost = a.accumulate_step.counts,sum(len(micros[i]) for i in left_out)*2
    assert (n.n_dropped,n.n_samples,n.n_stepped,n.n_thrown)==(2*len(left_out), 2*N, 2*N-lost, lost)

@pytest.mark.parametrize('left_out', [{0,1,2,3}, {4,5,6,7}, {8,9}, set(range(10))], ids=str)
def test_whole_windows(left_out):
    "A window of which nothing is left makes no step and logs nothing; the schedule moves on"
    a = make_learner(make_dls(N, BS, shuffle=False), cbs=[AccumulateStep(4), dropper(left_out, 'after_loss')], opt_func=SGD)
    none = len(left_out)==len(micros)
    old = [p.clone() for p in a.model.parameters()]
    a.fit(2)
    if none: assert all(torch.equal(p,o) for p,o in zip(a.model.parameters(), old))
    else:
        b = large(left_out, opt_func=SGD); b.fit(2)
        for k in 'params','losses': assert rel(snapshot(a)[k], snapshot(b)[k])[0]<=TOL, k
    assert len(a.recorder.lrs)==len(a.recorder.losses)==a.accumulate_step.counts.n_steps==(0 if none else 4)
    assert a.pct_train==pytest.approx(1) or left_out>={8,9}

def test_counting_samples():
    "With `n_samples` the window goes on until enough are in"
    a = make_learner(make_dls(96, BS, shuffle=False), cbs=[AccumulateStep(n_samples=32), dropper({1,3}, 'after_loss')], opt_func=SGD)
    a.fit(1)
    n = a.accumulate_step.counts
    assert (n.n_steps,n.n_stepped,n.n_thrown)==(3,80,16)

def test_train_metrics():
    "Metrics over the training set do not count it"
    cbs = [AccumulateStep(4), dropper({2,3,9}, 'after_loss')]
    a,b = make_learner(make_dls(N, BS, shuffle=False), cbs=cbs, metrics=accuracy),large({2,3,9}, metrics=accuracy)
    for l in (a,b): l.recorder.train_metrics = True; l.fit(1)
    assert_same(a, b, but=('values','final_record'))
    assert rel(a.recorder.values, b.recorder.values)[0]<1e-6   # fastai's accuracy is a float32 mean

def test_misuse():
    "Calling `drop` too late, or outside training, is an error"
    def f(cb):
        if cb.training: cb.accumulate_step.drop()
    for event in 'after_backward','after_batch':
        learn = make_learner(make_dls(N, BS), cbs=[AccumulateStep(4), Callback(**{event:f})])
        with pytest.raises(RuntimeError, match='drop comes too late'): learn.fit(1)
    learn = make_learner(make_dls(N, BS), cbs=AccumulateStep(4))
    with pytest.raises(RuntimeError, match='drop can only be called while a micro-batch of training runs'): learn.accumulate_step.drop()
    twice = Callback(after_loss=lambda cb: [cb.accumulate_step.drop() for _ in range(2)] if cb.training and cb.micro.i==1 else None)
    learn = make_learner(make_dls(N, BS), cbs=[AccumulateStep(4), twice]); learn.fit(1)
    assert learn.accumulate_step.counts.n_dropped==1

def nan_at(which, value=math.nan):
    x = features(N).clone()
    for i in which: x[micros[i][0]] = value
    return x

@pytest.mark.parametrize('value', [math.nan, 1e400], ids=['nan','inf'])
@pytest.mark.parametrize('which', [{0}, {3}, {1,2,9}, {4,5,6,7}], ids=str)
def test_skip_non_finite(which, value):
    "Trains on the rest exactly, and warns once; other callbacks do not see the NaN"
    dls = make_dls(N, BS, shuffle=False, x=nan_at(which, value)); dls.valid.dataset.x = features(24)
    a = make_learner(dls, cbs=[AccumulateStep(4), SkipNonFinite(), TerminateOnNaNCallback()], opt_func=SGD)
    b = large(which, opt_func=SGD)
    with pytest.warns(UserWarning) as rec: a.fit(2)
    msgs = [str(o.message) for o in rec if 'SkipNonFinite' in str(o.message)]
    assert len(msgs)==1 and f'micro-batch {min(which)%4+1} of window {min(which)//4+1} in epoch 0 is left out' in msgs[0]
    b.fit(2)
    for k in 'params','opt','losses': assert rel(snapshot(a)[k], snapshot(b)[k])[0]<=TOL, k
    assert a.accumulate_step.counts.n_dropped==2*len(which)

def test_without_it_plain():
    "Without it the NaN is fastai's: the window is lost, as the large batch would be"
    x = nan_at({1})
    a,b = (make_learner(make_dls(N, bs, shuffle=False, x=x), cbs=cbs, opt_func=SGD) for bs,cbs in ((8,AccumulateStep(4)), (32,None)))
    for l in (a,b): l.fit(1)
    assert all(p.isnan().all() for l in (a,b) for p in list(l.model.parameters())[-1:])

def test_ignored_targets_are_no_error():
    "A micro-batch of which every target is ignored has a mean of NaN, and is not reported"
    y = classes(N); y[8:16] = -100
    a,b = (make_learner(make_dls(N, bs, y=y, shuffle=False), cbs=cbs) for bs,cbs in ((8,[AccumulateStep(4),SkipNonFinite()]), (32,None)))
    with warnings.catch_warnings(): warnings.filterwarnings('error', 'SkipNonFinite'); a.fit(2)
    b.fit(2)
    assert_same(a, b)
    assert a.accumulate_step.counts.n_dropped==0

def test_needs_accumulate_step():
    learn = make_learner(make_dls(N, BS), cbs=SkipNonFinite())
    with pytest.raises(ValueError, match='the learner has no AccumulateStep'): learn.fit(1)
    learn.validate()   # trains nothing

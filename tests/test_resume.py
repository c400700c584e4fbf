"""Training that is saved at an epoch's end and resumed equals the uninterrupted run, and both equal the large batch.

The loaders do not shuffle: fastai saves no random state, so a shuffled run cannot be resumed exactly, with or
without accumulation."""
import pytest
from contextlib import nullcontext
from harness import *
from fastai_accum.patch import *

n_epoch = 4
def learner(bs, path, cbs=None): return make_learner(make_dls(76, bs, shuffle=False), path=path, cbs=cbs)
def checkpoints(): return SaveModelCallback(every_epoch=True, with_opt=True)
fits = dict(fit=lambda l,**kw: l.fit(n_epoch, 0.02, **kw),
            one_cycle=lambda l,**kw: l.fit_one_cycle(n_epoch, 0.02, **kw),
            sgdr=lambda l,**kw: l.fit_sgdr(2, 1, 0.02, cycle_mult=3, **kw))

class Interrupt(Callback):
    "Ctrl-C in the middle of a window of `epoch`"
    def __init__(self, epoch): self.at = epoch
    def after_backward(self):
        if self.epoch==self.at and self.micro.i==5: raise KeyboardInterrupt

@drawn(3, fit=fits, how=['callback','patch'], same=[True,False])
def test_resume(fit, how, same, tmp_path):
    "Interrupted in the middle of a window, loaded from the last checkpoint, and gone on with `start_epoch`"
    make = lambda: learner(8, tmp_path, AccumulateStep(4) if how=='callback' else None)
    with accumulation(4) if how=='patch' else nullcontext():
        whole,a = make(),make()
        fits[fit](whole)
        with pytest.raises(KeyboardInterrupt): fits[fit](a, cbs=[checkpoints(),Interrupt(2)])
        if not same: a = make()
        a.load('model_1')
        a.spy.steps = []
        fits[fit](a, start_epoch=2)
    large = learner(32, tmp_path); fits[fit](large)
    for b in whole,large:
        for k in 'params','opt','hypers': assert rel(snapshot(a)[k], snapshot(b)[k])[0]<=TOL, k
        # the smoothed training loss starts anew
        assert rel([o[1:] for o in a.recorder.values[-2:]], [o[1:] for o in b.recorder.values[-2:]])[0]<=TOL
        for k in 'grads','hypers','pct_train':
            assert rel([s[k] for s in a.spy.steps], [s[k] for s in b.spy.steps[6:]])[0]<=TOL, k

def keep_best(): return SaveModelCallback(fname='best', with_opt=True)
def stop_early(): return EarlyStoppingCallback(min_delta=10, patience=2)   # after the third epoch

@each(make=[keep_best,stop_early])
def test_trackers(make, tmp_path, capsys):
    """What the trackers of the large batch see, save and load; and training goes on from what was saved as it would
    have without them"""
    def train(bs, cbs, **kwargs):
        learn = learner(bs, tmp_path, AccumulateStep(4) if bs==8 else None)
        if kwargs: learn.load(f"model_{kwargs['start_epoch']-1}")
        learn.fit_one_cycle(n_epoch, 0.02, cbs=cbs, **kwargs)
        return learn
    a,b = train(8, [make(),checkpoints()]),train(32, [make()])
    assert_same(a, b)
    assert len(a.recorder.values)==(3 if make is stop_early else n_epoch)
    # fastai's trackers fail with `start_epoch`
    resumed,whole = train(8, [], start_epoch=len(a.recorder.values)-1),train(8, [])
    for k in 'params','opt','hypers': assert rel(snapshot(resumed)[k], snapshot(whole)[k])[0]<=TOL, k

def test_short_epochs(tmp_path):
    "Training can be resumed from the end of an epoch that was cut short"
    def train(cbs=None, **kwargs):
        learn = learner(8, tmp_path, AccumulateStep(4))
        if kwargs: learn.load('model_1')
        learn.fit_one_cycle(n_epoch, 0.02, cbs=[ShortEpochCallback(0.3), *L(cbs)], **kwargs)
        return learn
    whole,resumed = train(checkpoints()),train(start_epoch=2)
    for k in 'params','opt','hypers': assert rel(snapshot(resumed)[k], snapshot(whole)[k])[0]<=TOL, k
    n = whole.accumulate_step.counts
    assert (n.n_samples,n.n_stepped,n.n_thrown)==(n_epoch*64, n_epoch*64, 0)   # two of three windows

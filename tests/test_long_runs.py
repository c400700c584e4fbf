"""Training that is saved at an epoch's end and resumed equals the uninterrupted run, and both equal the large batch.

The loaders do not shuffle: fastai saves no random state, so a shuffled run cannot be resumed exactly, with or
without accumulation."""
import gc,os,sys
from contextlib import nullcontext
from harness import *

def learner(bs, path, cbs=None): return make_learner(make_dls(76, bs, shuffle=False), path=path, cbs=cbs)
fits = dict(fit=lambda l,**kw: l.fit(4, 0.02, **kw), one_cycle=lambda l,**kw: l.fit_one_cycle(4, 0.02, **kw),
            sgdr=lambda l,**kw: l.fit_sgdr(2, 1, 0.02, cycle_mult=3, **kw))   # of 1 epoch and of 3

def interrupt(cb):
    "Ctrl-C in the middle of a window"
    if cb.epoch==2 and cb.learn.micro.i==5: raise KeyboardInterrupt

@drawn(3, fit=fits, how=['callback','patch'], same=[True,False])
def test_resume(fit, how, same, tmp_path):
    "Interrupted in the middle of a window, loaded from the last checkpoint, and gone on with `start_epoch`"
    def make(): return learner(8, tmp_path, AccumulateStep(4) if how=='callback' else None)
    with accumulation(4) if how=='patch' else nullcontext():
        whole,a = make(),make()
        fits[fit](whole)
        saves = SaveModelCallback(every_epoch=True, with_opt=True)
        with pytest.raises(KeyboardInterrupt): fits[fit](a, cbs=[saves,Callback(after_backward=interrupt)])
        if not same: a = make()
        a.load('model_1')
        a.spy.steps = []
        fits[fit](a, start_epoch=2)
    large = learner(32, tmp_path); fits[fit](large)
    for b in whole,large:
        close(*([snapshot(l)[k] for k in ('params','opt','hypers')] for l in (a,b)))
        # the smoothed training loss starts anew
        close([o[1:] for o in a.recorder.values[-2:]], [o[1:] for o in b.recorder.values[-2:]])
        for k in 'grads','hypers','pct_train': close([s[k] for s in a.spy.steps], [s[k] for s in b.spy.steps[6:]])

# Six thousand micro-batches (`make sweep`: a hundred thousand): no memory that stays, and no work that grows

def rss():
    "Resident memory of this process in MiB"
    gc.collect()
    return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')/2**20

class Watch(EachMicro):
    "Memory each 500 micro-batches, and the calls of Python in the hundred before"
    order = Recorder.order-1
    def before_fit(self): self.n,self.mem,self.calls = 0,[],[]
    def count(self, frame, event, arg): self.calls[-1] += event=='call'
    def after_batch(self):
        if not self.training: return
        self.n += 1
        if self.n%500==400: self.calls.append(0); sys.setprofile(self.count)
        if self.n%500==0: sys.setprofile(None); self.mem.append(rss())
    def after_fit(self): sys.setprofile(None)

@pytest.mark.skipif(not Path('/proc/self/statm').exists(),
                    reason='reads the memory of the process from /proc, which only Linux has')
def test_soak():
    "Without `Recorder`, whose lists grow by one a step"
    watch,n_epoch = Watch(),100 if SWEEP else 6
    learn = make_learner(make_dls(1000*8-3, 8, skip=(5,77)), cbs=[watch,AccumulateStep(n_samples=30, drop_last=True)])
    learn.remove_cbs([Spy,Recorder])
    learn.fit(n_epoch)
    first,last = (sorted(o)[3] for o in (watch.calls[:6], watch.calls[-7:-1]))   # an epoch may end among them
    grown = watch.mem[-1]-watch.mem[0]
    print(f'{watch.n} micro-batches; {grown:+.2f} MiB from the first 500 to the end; calls × {last/first:.3f}')
    assert watch.n>=n_epoch*990 and grown<1 and last/first<1.05
    n = learn.accumulate_step.counts
    assert n.n_samples==n.n_stepped+n.n_thrown

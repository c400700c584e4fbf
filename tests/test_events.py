"What a callback sees, and what is counted: nothing in the callbacks here knows of accumulation"
import pytest
from harness import *
from fastai.callback.hook import ActivationStats
from fastai_accum.patch import *

cases = dict(
    kept      = dict(cbs=lambda: AccumulateStep(4)),
    dropped   = dict(cbs=lambda: AccumulateStep(4), drop_last=True),
    n_samples = dict(cbs=lambda: AccumulateStep(n_samples=64), n=200, bs=24, large=72),
    shorter   = dict(cbs=lambda: AccumulateStep(4), n=92, skip=(3,14,15,33,60,61,62,63)),
    micro     = dict(cbs=lambda: MicroBatch(5), bs=32),
    coupled   = dict(cbs=lambda: MicroBatch(5, coupled=True), bs=32),
    both      = dict(cbs=lambda: [AccumulateStep(4), MicroBatch(3)]))

@pytest.mark.parametrize('case', cases)
def test_every_event(case):
    "Events, counters, the schedule and the loss, at orders around fastai's own"
    a,b = same(**cases[case], also=probes)
    assert [o[:-2] for o in a.seen]==[o[:-2] for o in b.seen] and {o[0] for o in b.seen}==set(events)
    close([o[-2:] for o in a.seen], [o[-2:] for o in b.seen])

@pytest.mark.parametrize('order', [-math.inf, 0, 1000])
def test_before_step(order):
    "`before_step` sees finished gradients and the mean loss of the window, at any order, and may change them"
    class Look(Callback):
        def before_fit(self): self.seen = []
        def before_step(self):
            self.seen.append([self.learn.loss.item()] + [p.grad.clone() for p in self.model.parameters()])
            nn.utils.clip_grad_norm_(self.model.parameters(), .1)
    def make(): cb = Look(); cb.order = order; return cb
    a,b = same(lambda: AccumulateStep(4), also=make)
    close(a.look.seen, b.look.seen)
    assert len(b.look.seen)==6

def test_boundary_and_counts():
    log = []
    def look(cb):
        a = cb.accumulate_step
        if cb.training: log.append((a.is_boundary, a.window.n_micro, a.window.n_samples, a.counts.n_steps))
        else: assert not a.is_boundary and a.window is None
    learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4), Callback(before_batch=look)])
    learn.fit(1)
    assert log==[(i in (3,7,9), i%4+1, i%4*8, i//4) for i in range(10)]
    c = learn.accumulate_step.counts
    assert (c.n_micro,c.n_samples,c.n_steps,c.n_stepped,c.n_thrown,c.sizes)==(10,76,3,76,0,[32,32,12])
    learn.validate()
    assert learn.accumulate_step.counts.n_steps==3 and learn.accumulate_step.window is None

def test_train_metrics():
    "Metrics of the training set count every micro-batch with its own loss; the loss that is logged is the window's"
    def fit(learn): learn.recorder.train_metrics = True; learn.fit(2)
    for c in 'kept','micro','both':
        a,b = same(**cases[c], fit=fit, metrics=[accuracy,Losses()], but=('values','final_record'))
        assert rel(a.recorder.values, b.recorder.values)[0]<1e-6   # accuracy is a float32 mean in fastai
        i = a.recorder.metric_names.index('train_losses')-1
        close(L(a.recorder.values).itemgot(i), L(b.recorder.values).itemgot(i))

def test_each_micro_batch():
    "What gathers predictions, data or activations has `after_batch` at each micro-batch, and sees each sample once"
    class Gathers(Callback):
        each_micro_batch = True
        def before_train(self): self.seen = []
        def after_batch(self):
            if self.training: self.seen.append(self.learn.pred.detach())
    for c in 'kept','micro','both':
        a,b = pair(**cases[c], also=[Gathers, lambda: ActivationStats(modules=None)], fit=lambda l: l.fit(1, lr=0.))
        close(torch.cat(a.gathers.seen), torch.cat(b.gathers.seen))
        assert len(a.gathers.seen)>len(b.gathers.seen) and not any(m._forward_hooks for m in a.model.modules())

def no_valid(cb): raise CancelValidException

def test_progress(monkeypatch):
    "The bar counts the batches of the loader, and moves at each"
    import fastai.callback.progress as fap
    seen = []
    class Bar(fap.progress_bar):
        def update(self, val): seen.append((val,self.total)); super().update(val)
    monkeypatch.setattr(fap, 'progress_bar', Bar)
    learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4), Callback(before_validate=no_valid)])
    learn.add_cb(ProgressCallback())
    learn.fit(1)
    assert list(dict.fromkeys(seen))==[(i,10) for i in range(11)]

@pytest.mark.parametrize('event', ['before_batch','after_loss'])
@pytest.mark.parametrize('which', [{1}, {3,9}, {4,5,6,7}], ids=str)
def test_left_out(which, event):
    """`CancelBatchException` before the backward pass leaves a micro-batch out; the large batch is one without its
    samples"""
    def cancel(cb):
        if cb.training and cb.micro.i in which: raise CancelBatchException
    a = make_learner(make_dls(76, 8, shuffle=False), cbs=[Callback(**{event:cancel}), AccumulateStep(4)], opt_func=SGD)
    a.fit(1)
    x,y = features(76),classes(76)
    windows = [[i for i in w if i not in which] for w in ([0,1,2,3],[4,5,6,7],[8,9])]
    idxs = [torch.cat([torch.arange(j*8, min(j*8+8,76)) for j in w]) for w in windows if w]
    b = make_learner(DataLoaders(DataLoader([(x[i],y[i]) for i in idxs], bs=None), a.dls.valid), opt_func=SGD)
    b.fit(1)
    close(snapshot(a)['params'], snapshot(b)['params'])
    n,left = a.accumulate_step.counts,sum(map(len, idxs))
    assert (n.n_steps,n.n_stepped,n.n_thrown)==(len(idxs),left,76-left) and len(n.sizes)==3

@pytest.mark.parametrize('exc', [CancelBatchException, CancelStepException])
def test_cancelled_window(exc):
    """`CancelBatchException` after the backward pass leaves its window out, `CancelStepException` skips its step: the
    window is over, and its gradients are gone"""
    event = 'after_backward' if exc is CancelBatchException else 'before_step'
    def cancel(cb):
        if cb.training and cb.epoch==0 and cb.micro.i==5 and event=='after_backward': raise exc
        if cb.training and cb.epoch==0 and cb.micro.i==7 and event=='before_step': raise exc
    def plain(cb):
        if cb.training and cb.epoch==0 and cb.micro.i==1: raise exc
    a = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4), Callback(**{event:cancel})])
    b = make_learner(make_dls(76, 32), cbs=Callback(**{'before_batch' if event=='after_backward' else event:plain}))
    for l in (a,b): l.fit(2)
    close(*([snapshot(l)[k] for k in ('params','opt','hypers','step.hypers','train_iter','pct_train')] for l in (a,b)))
    n = a.accumulate_step.counts
    assert n.sizes==[32,0,12,32,32,12] and n.n_thrown==32

def test_no_targets():
    "A micro-batch whose targets are all ignored adds nothing; a window of them makes no step"
    y = classes(76); y[8:16] = -100
    a,b = same(lambda: AccumulateStep(4), y=y)
    assert not any(math.isnan(o) for o in a.recorder.losses)
    y[32:64] = -100
    learn = make_learner(make_dls(76, 8, y=y, shuffle=False), cbs=AccumulateStep(4))
    learn.fit(2)
    assert learn.accumulate_step.counts.sizes==[32,0,12]*2 and len(learn.spy.steps)==4
    assert all(p.isfinite().all() for p in learn.model.parameters()) and not any(map(math.isnan, learn.recorder.losses))

def test_skip_the_step():
    "A newcomer's task in one place: skip the step when the norm of the gradient exceeds a limit"
    limit = .4
    class SkipLarge(Callback):
        def before_step(self):
            norm = torch.stack([p.grad.norm() for p in self.model.parameters()]).norm()
            if norm>limit: raise CancelStepException
    a,b = same(lambda: AccumulateStep(4), also=SkipLarge)
    n = a.accumulate_step.counts
    assert 0<n.n_steps<6 and n.n_thrown>0

def test_only_fastais_bar_is_counted_for(monkeypatch):
    "A callback, or the model, may have a bar of its own in `pbar`, or any other name of ours"
    class Bar:
        def __init__(self): self.seen = []
        def update(self): self.seen.append(1)   # as tqdm's: one more
    class Own(Callback):
        order = 61
        def before_fit(self): self.pbar = Bar()
        def after_batch(self): self.pbar.update()
    def named():
        m = small_model()
        m.pbar,m.autocast,m.each_micro_batch,m.train_epoch,m.cuts,m.without = Bar(),3,True,4,5,6
        return m
    a,b = same(lambda: AccumulateStep(4), also=Own, model=named)
    assert a.own.pbar.seen==b.own.pbar.seen!=[]
    with accumulation(4): learn = make_learner(make_dls(76, 8), named()); learn.fit(1)
    assert len(learn.spy.steps)==3

@pytest.mark.parametrize('name', ['run','run_train'])
def test_switched_off(name):
    "As fastai's own callbacks: `run` for one fit, `run_train` in training"
    off = dict(acc=lambda: AccumulateStep(4), micro=lambda: MicroBatch(3), coupled=lambda: MicroBatch(3, coupled=True))
    for f in off.values():
        def cb(): cb = f(); setattr(cb, name, False); return cb
        a,b = pair(cb, 8, 8)
        assert snapshot(a)['params']==[] or rel(snapshot(a), snapshot(b))[0]==0   # bit for bit plain fastai
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(4))
    learn.accumulate_step.run = False
    learn.fit(1); assert len(learn.spy.steps)==8
    learn.fit(1); assert len(learn.spy.steps)==8+2
    both = make_learner(make_dls(64, 8), cbs=[AccumulateStep(4),MicroBatch(3)])
    both.accumulate_step.run_train = False
    both.fit(1); assert len(both.spy.steps)==8 and both.micro_batches.counts.n_micro==24

def test_run_valid():
    "`run_valid=False` is `valid=False`"
    sizes,learn = [],make_learner(make_dls(64, 8), cbs=MicroBatch(3))
    learn.model[0].register_forward_hook(lambda m, x, y: sizes.append(len(y)))
    learn.validate(); assert max(sizes)==3
    learn.micro_batches.run_valid = False
    learn.validate(); assert max(sizes)==16

class Unlabelled(DataLoader):
    "Every batch, or every one but the first, has no targets"
    def __iter__(self): return ((b[0],) if i>=self.first else b for i,b in enumerate(super().__iter__()))

@pytest.mark.parametrize('first', [0,1])
def test_batches_without_targets(first):
    "They make no step, and have their `after_batch`, as in plain fastai"
    class Count(Callback):
        n = 0
        def after_batch(self): self.n += self.training
    def train(cbs=None):
        dls = make_dls(64, 8)
        dls.train.__class__,dls.train.first,dls.n_inp = Unlabelled,first,1
        learn = make_learner(dls, cbs=[Count(), *L(cbs)])
        learn.fit(1)
        return learn
    a,b = train(AccumulateStep(1)),train()
    assert a.count.n==b.count.n==8 and len(a.spy.steps)==len(b.spy.steps)==first
    assert a.train_iter==b.train_iter==8 and train(AccumulateStep(4)).count.n==2

def test_a_subclass_with_its_own_before_fit():
    "It need not call `super()`: what the last fit has counted does not stay"
    class Own(AccumulateStep):
        def before_fit(self): self.mine = 1
    class Calls(AccumulateStep):
        def before_fit(self): self.n_step = 4; super().before_fit()
    for cb in Own(4),Calls(2):
        learn = make_learner(make_dls(64, 8), cbs=cb)
        for _ in range(2):
            learn.fit(1)
            assert cb.counts.sizes==[32,32]

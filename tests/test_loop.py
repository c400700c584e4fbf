"The loop over windows: what is counted, tails, micro-batches that are left out, overrides, removed callbacks"
import pytest
from contextlib import nullcontext
from functools import partial
from harness import *
from fastai_accum.all import *

class Augmented(Items):
    "A dataset that draws random numbers for each item, as random item transforms do"
    def __getitem__(self, i):
        x,*y = super().__getitem__(i)
        return (x+.3*random.random(),*y)

@each(window=[dict(n_step=4), dict(n_samples=32)])
def test_a_dropped_tail_is_drawn(window):
    "It is drawn and thrown away without being run, because the loader of the large batch draws these items too"
    runs = []
    def dls(bs, drop_last):
        trn = DataLoader(Augmented(features(84), classes(84)), bs=bs, shuffle=True, drop_last=drop_last)
        return DataLoaders(trn, make_dls(76, 16).valid)
    class Drawn(DataLoader):
        "A large batch that is dropped when its items have been drawn"
        def create_batches(self, samps):
            for b in super().create_batches(samps):
                if len(b[0])==32: yield b
        def __len__(self): return 2
    x,y = features(84),classes(84)
    a = make_learner(dls(8, False),
                     cbs=[AccumulateStep(**window, drop_last=True), Callback(after_pred=lambda cb: runs.append(1))])
    b = make_learner(DataLoaders(Drawn(Augmented(x, y), bs=32, shuffle=True), a.dls.valid))
    for l in (a,b):
        random.seed(1); l.dls.train.rng.seed(1)
        l.fit(2)
    assert_same(a, b)
    assert len(runs)-2*2==2*8 and a.accumulate_step.counts.n_thrown==2*20

def test_samples_are_counted_as_they_arrive():
    "Batches of 4, 32 and 24 samples are two windows of 30, not three"
    sizes = [4,32,24]
    cuts = [0,*np.cumsum(sizes)]
    def dls(parts): return DataLoaders(DataLoader(parts, bs=None), make_dls(76, 16).valid)
    x,y = features(60),classes(60)
    parts = [(x[i:j],y[i:j]) for i,j in zip(cuts, cuts[1:])]
    a = make_learner(dls(parts), cbs=AccumulateStep(n_samples=30, drop_last=False), opt_func=SGD)
    b = make_learner(dls([(x[:36],y[:36]), (x[36:],y[36:])]), opt_func=SGD)
    for l in (a,b): l.fit(1)
    close(*([snapshot(l)[k] for k in ('params','step.grads','losses')] for l in (a,b)))
    assert a.accumulate_step.counts.sizes==[36,24]

@each(cb=[AccumulateStep(4), MicroBatch(3)])
def test_a_cancelled_backward_pass(cb):
    "A callback that goes backward by itself and cancels fastai's pass gets an error that names it"
    def backward(cb): cb.learn.loss_grad.backward(); raise CancelBackwardException
    learn = make_learner(make_dls(64, 8), cbs=[cb, Callback(before_backward=backward)])
    with pytest.raises(RuntimeError, match='CancelBackwardException'): learn.fit(1)
    is_clean(learn)

class Follows(Learner):
    "Keeps an average of the weights, in what it overrides"
    n = 0
    def _do_grad_opt(self):
        super()._do_grad_opt()
        self.n += 1
        with torch.no_grad():
            if not hasattr(self, 'avg'): self.avg = [p.clone() for p in self.model.parameters()]
            for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p, .1)

@pytest.mark.parametrize('bs,cbs', [(8, lambda: AccumulateStep(4)), (8, lambda: [AccumulateStep(4), MicroBatch(3)]),
                                    (32, lambda: MicroBatch(5, coupled=True))], ids=['acc','both','coupled'])
def test_an_override_of_do_grad_opt(bs, cbs):
    "What follows `super()` runs once a window"
    def fit(learn): learn.__class__ = Follows; learn.fit_one_cycle(2)
    a,b = same(cbs, bs, fit=fit)
    close(a.avg, b.avg)
    assert a.n==b.n==6

class OwnStep(Learner):
    "Makes the backward pass and the step by itself"
    def one_batch(self, i, b):
        if not self.training: return super().one_batch(i, b)
        self._split(b)
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        self.opt.step(); self.opt.zero_grad()

def test_a_learner_that_steps_by_itself():
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(4))
    learn.__class__ = OwnStep
    with pytest.raises(RuntimeError, match='AccumulateStep.*steps by itself'): learn.fit(1)

def test_a_cancelled_step_is_not_counted():
    "A scaler that skips the step by itself cancels nothing, and counts as fastai counts it"
    def skip(cb):
        if cb.train_iter==1: raise CancelStepException
    a,b = same(lambda: AccumulateStep(4), also=lambda: Callback(before_step=skip))
    n = a.accumulate_step.counts
    assert (n.n_steps,n.n_stepped,n.n_thrown,n.sizes)==(5,120,32,[32,0,12,32,32,12]) and a.train_iter==6

def test_the_loss_is_scaled_by_one_constant():
    "The same for all windows of a fit, whatever they weigh; the sum of a window is divided by its weight at the end"
    w,scales,windows = tensor([1.,10.,3.]).double(),[],[]
    def look(cb):
        acc,model,grads = cb.accumulate_step,cb.model,[p.grad.clone() for p in cb.model.parameters()]
        scales.append(acc.window.scale)
        if acc.window.n_micro>1: return
        loss = F.cross_entropy(cb.pred, *cb.yb, weight=w, reduction='sum')
        with torch.enable_grad(): again = F.cross_entropy(model(*cb.xb), *cb.yb, weight=w, reduction='sum')
        close(grads, [g/scales[-1] for g in torch.autograd.grad(again, list(model.parameters()))])
    def ends(cb): windows.append((cb.accumulate_step.window.total, cb.accumulate_step.window.factor))
    learn = make_learner(make_dls(76, 8), loss_func=nn.CrossEntropyLoss(weight=w),
                         cbs=[AccumulateStep(4), Callback(after_backward=look, before_step=ends)])
    learn.fit(2)
    assert len(set(scales))==1 and len(scales)==20 and len({t for t,_ in windows})>1
    close([t*f for t,f in windows], [scales[0]]*6)

class Learned(nn.Module):
    "A loss with a parameter that the optimizer does not hold"
    def __init__(self): super().__init__(); self.s = nn.Parameter(torch.ones(3).double())
    def forward(self, p, y): return F.cross_entropy(p*self.s, y)

@pytest.mark.parametrize('event,exc', [('after_backward',CancelBatchException), ('after_backward',CancelTrainException),
                                       ('after_backward',KeyboardInterrupt), ('before_step',CancelBatchException)])
def test_a_window_that_is_thrown_away_clears_all(event, exc):
    "Also the gradients of what the optimizer does not hold: a frozen part of the model, and the loss's own parameters"
    loss = Learned()
    def stop(cb):
        if cb.training and cb.micro.i==(7 if event=='before_step' else 5): raise exc
    learn = make_learner(make_dls(64, 8), loss_func=loss, splitter=lambda m: [params(m[0])],
                         cbs=[AccumulateStep(4), Callback(**{event:stop})])
    with pytest.raises(exc) if exc is KeyboardInterrupt else nullcontext(): learn.fit(1)
    for p in *learn.model.parameters(),loss.s: assert p.grad is None or not p.grad.any()

@each(8, cbs=[(AccumulateStep,),(MicroBatch,),(AccumulateStep,MicroBatch)],
       event='''before_epoch before_train before_batch after_loss after_backward before_step after_batch
                after_train'''.split())
def test_removed_in_mid_epoch(cbs, event):
    """The windows end cleanly: this epoch goes on as it was planned, and the next one is without them; of two callbacks
    the other one goes on"""
    in_loop = event in 'before_batch after_loss after_backward before_step after_batch'
    def remove(cb):
        if cb.epoch==0 and (cb.train_iter==1 or not in_loop):
            cb.learn.remove_cbs(cb.learn.cbs.filter(risinstance(cbs[0])))
    learn = make_learner(make_dls(76, 8), cbs=[*(o(4) for o in cbs), Callback(**{event:remove})])
    learn.fit(2)
    is_clean(learn)
    n = 10 if event in ('before_epoch','before_train') else 3 if AccumulateStep in cbs else 10
    assert len(learn.spy.steps)==n+10 and not learn.cbs.filter(risinstance(cbs[0]))

@each(cls=[AccumulateStep,MicroBatch])
def test_one_instance_in_two_learners(cls):
    "As when `cbs` is shared by folds: the first one, which has lost it, raises when it trains"
    cb = cls(4)
    a,b = (make_learner(make_dls(64, 8), cbs=cb) for _ in range(2))
    with pytest.raises(ValueError, match='this instance is in another Learner too'): a.fit(1)
    b.fit(1)
    assert len(b.spy.steps)==(2 if cls is AccumulateStep else 8)

def test_given_to_fit():
    a,_ = same(list, fit=lambda l: l.fit(2, cbs=AccumulateStep(4) if l.dls.train.bs==8 else None))
    assert not hasattr(a, 'accumulate_step')

@each(keep=[True, False])
def test_drop_last_decides(keep):
    "`drop_last` against the loader's own: a large loader over the same samples"
    n = 116
    a = make_learner(make_dls(n, 8, drop_last=keep, shuffle=False), cbs=AccumulateStep(4, drop_last=not keep))
    b = make_learner(make_dls(n, 32, shuffle=False, x=features(n), y=classes(n)))
    n_seen = n//8*8 if keep else n//32*32
    b.dls = DataLoaders(DataLoader(Items(features(n)[:n_seen], classes(n)[:n_seen]), bs=32), b.dls.valid)
    for l in (a,b): l.fit_one_cycle(2)
    assert_same(a, b)

@each(cb=[AccumulateStep(4), AccumulateStep(4, drop_last=True), MicroBatch(3)])
def test_progress_moves_at_each_micro_batch(cb, monkeypatch):
    "The bar counts the batches of the loader; those of a dropped tail are not run"
    import fastai.callback.progress as fap
    seen = []
    class Bar(fap.progress_bar):
        def update(self, val): seen.append((val,self.total)); super().update(val)
    monkeypatch.setattr(fap, 'progress_bar', Bar)
    learn = make_learner(make_dls(76, 8), cbs=[NoValid(),cb])
    learn.add_cb(ProgressCallback())
    learn.fit(1)
    assert list(dict.fromkeys(seen))==[(i,10) for i in range(9 if getattr(cb, 'drop_last', None) else 11)]

@each(7, which=[{1}, {3}, {9}, {1,3,4,5}, {4,5,6,7}, {8,9}], order=[-1000,0,1000],
       event=['before_batch','after_pred','after_loss','before_backward'])
def test_cancelled_micro_batches(which, event, order):
    """A micro-batch that is cancelled before its backward pass adds nothing, and its window steps all the same, also
    if it was the boundary"""
    def cancel(cb):
        if cb.training and cb.micro.i in which: raise CancelBatchException
    cb = Callback(**{event:cancel}); cb.order = order
    learn = make_learner(make_dls(76, 8, shuffle=False), cbs=[cb, AccumulateStep(4)], opt_func=SGD, wd=0.)
    learn.fit(1)
    # by hand: windows of the micro-batches that are left
    model,x,y = small_model(),features(76),classes(76)
    windows = [[i for i in w if i not in which] for w in ([0,1,2,3],[4,5,6,7],[8,9])]
    for w in windows:
        if not w: continue
        i = torch.cat([torch.arange(j*8, min(j*8+8,76)) for j in w])
        model.zero_grad()
        F.cross_entropy(model(x[i]), y[i]).backward()
        with torch.no_grad():
            for p in model.parameters(): p -= 0.02*p.grad
    close(list(learn.model.parameters()), list(model.parameters()))
    n = learn.accumulate_step.counts
    left = sum(len(range(j*8, min(j*8+8,76))) for w in windows for j in w)
    assert (n.n_steps,n.n_stepped,n.n_thrown)==(sum(map(bool,windows)),left,76-left)

@each(5, at=[4,5,7,8,9], order=[-1000,1000])
def test_cancelled_after_backward(order, at):
    """Its gradient is in, so its window is left out: the rest is drawn, not run, and the large batch would be left
    out too"""
    seen = []
    def cancel(cb):
        seen.append(cb.micro.i)
        if cb.micro.i==at: raise CancelBatchException
    def leave_out(cb):
        if cb.training and cb.micro.i==at//4: raise CancelBatchException
    cb = Callback(after_backward=cancel); cb.order = order
    a = make_learner(make_dls(76, 8), cbs=[cb, AccumulateStep(4)])
    b = make_learner(make_dls(76, 32), cbs=Callback(before_batch=leave_out))
    for l in (a,b): l.fit(2)
    assert_same(a, b, but=('losses','values','final_record','smooth_loss'))   # what is logged for no step
    lost = 32 if at<8 else 12
    n = a.accumulate_step.counts
    assert (n.n_samples,n.n_stepped,n.n_thrown)==(152,152-2*lost,2*lost)
    n_run = at+1+(2 if at<8 else 0)
    assert seen==[*range(n_run)]*2

class WandbCallback(Callback):
    "What the callback of fastai does to its axis"
    order = Recorder.order+1
    def before_fit(self): self.axis = [0]
    def after_batch(self):
        if self.training: self.axis.append(self.axis[-1]+1/self.n_iter)

@each(sizes=[[8]*9+[4], [8]*8+[4], [8,3,9,12,8]])
def test_axis_of_wandb(sizes):
    """An epoch is 1, also where the loader is shorter than its length and its tail is closed in `after_train`; where
    the number of windows is unknown, the axis counts as it did"""
    known = len(sizes)>5
    learn = make_learner(make_dls(76, 8, shuffle=False, skip=range(68,76)[:8*(len(sizes)==9)]),
                         cbs=[AccumulateStep(**(dict(n_step=4) if known else dict(n_samples=20))), WandbCallback()])
    xs = [(features(n), classes(n)) for n in sizes]
    if not known: learn.dls = DataLoaders(DataLoader(xs, bs=None), DataLoader(xs[:1], bs=None))
    learn.fit(2 if known else 1)
    n = len(learn.spy.steps)
    assert learn.wandb.axis==pytest.approx([i/3 for i in range(n+1)] if known else [0,.2,.4])

def test_terminate_on_nan_of_weight_0():
    "A micro-batch of weight 0 does not end training: its loss of NaN is not shown"
    y = classes(76); y[8:16] = -100
    same(lambda: AccumulateStep(4), also=TerminateOnNaNCallback, y=y)

# A window of one micro-batch is plain fastai to every callback: batches differ in size here, and classes are weighted

class Clip(Callback):
    def after_backward(self): nn.utils.clip_grad_norm_(self.model.parameters(), .1)
class LogNorm(Callback):
    def before_fit(self): self.norms = []
    def after_backward(self):
        self.norms += [self.learn.loss_grad.item(), *(p.grad.norm().item() for p in self.model.parameters())]
class Penalty(Callback):
    "A backward pass of its own"
    def before_backward(self): (.1*sum(p.pow(2).sum() for p in self.model.parameters())).backward()

one_micro = dict(one_step=lambda: AccumulateStep(1), by_samples=lambda: AccumulateStep(n_samples=12),
                 uncut=lambda: MicroBatch(100), coupled=lambda: MicroBatch(5, coupled=True),
                 exact=lambda: MicroBatch(5, exact=True))

@each(way=one_micro, cb=[Clip,LogNorm,Penalty])
@pytest.mark.filterwarnings('ignore:MicroBatch.*no batch is cut')
def test_one_micro_batch_is_plain(way, cb):
    loss = nn.CrossEntropyLoss(weight=tensor([1.,5.,.2]).double())
    learn,plain = same(one_micro[way], bs=12, large=12, n=32, also=cb, loss_func=loss)
    if cb is LogNorm: close(learn.log_norm.norms, plain.log_norm.norms)

# A fit that makes no step says so once

class Skip(Callback):
    run_valid = False
    def __init__(self, event, error, every=4): self.error,self.every = error,every; setattr(self, event, self.stop)
    def stop(self):
        if (self.iter+1)%self.every: raise self.error

def warned(learn, n=1):
    with warnings.catch_warnings(record=True) as ws:
        warnings.simplefilter('always')
        learn.fit(n)
    return [str(o.message) for o in ws if 'no step' in str(o.message)]

@each(cb=[partial(AccumulateStep, 4), partial(AccumulateStep, n_samples=32), partial(MicroBatch, 4)],
      at=[('before_step',CancelBatchException), ('before_step',CancelStepException),
          ('after_backward',CancelBatchException), ('before_batch',CancelBatchException)])
def test_all_windows_are_cancelled(cb, at):
    said, = warned(make_learner(make_dls(24, 8), cbs=[cb(), Skip(*at)]), 3)
    assert cb.func.__name__ in said and 'was cancelled' in said
    # one step is enough
    assert not warned(make_learner(make_dls(64, 8), cbs=[AccumulateStep(2), Skip('before_step', CancelStepException)]))

def test_trials_say_nothing():
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(2))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.noise_scale(2, 3, False)
        learn.check_accumulation()

# By hand, as fastai's own notebooks do to look at MixUp

by_hand = dict(acc=lambda: AccumulateStep(4), coupled=lambda: MicroBatch(3, coupled=True),
               both=lambda: [AccumulateStep(2), MicroBatch(3)])

@each(name=by_hand)
def test_events_by_hand(name):
    mix = MixUp(.4)
    mix.distrib = torch.distributions.Beta(*torch.tensor([.4,.4], dtype=torch.float64))
    learn = make_learner(make_dls(64, 8, x=features(64, 16).view(64,1,4,4), y=classes(64), shuffle=False),
                         nn.Sequential(nn.Flatten(), small_model(16)), StackedCE(), cbs=[mix, *L(by_hand[name]())],
                         **one_group)
    with learn:
        learn.epoch,learn.training,learn.dl = 0,True,learn.dls.train
        learn('before_train')
        b = learn.dls.one_batch()
        learn._split(b)
        learn('before_batch')
        assert learn.x.shape==b[0].shape and not torch.equal(learn.x, b[0])   # mixed
        learn('after_train')
    is_clean(learn)
    learn.fit(1)
    assert len(learn.spy.steps)==dict(acc=2, both=4).get(name, 8)
    is_clean(learn)

@each(way=[(lambda: AccumulateStep(4), 8), (lambda: MicroBatch(8), 32)])
def test_a_loop_of_ones_own(way):
    "Only `fit` knows windows: each call of `learn.one_batch` is a step with its batch, as without our callbacks"
    cb,bs = way
    def run(cbs):
        learn = make_learner(make_dls(64, bs, shuffle=False), cbs=cbs)
        learn.remove_cbs([learn.recorder,learn.micro])
        learn.create_opt()
        learn.spy.before_fit()
        learn.model.train()
        learn.training,learn.train_iter,learn.pct_train,learn.n_iter = True,0,0.,64//bs
        learn.n_epoch = 1
        for i,b in enumerate(learn.dls.train): learn.one_batch(i, b)
        return learn.spy.steps,weights(learn)
    ours,plain = run(cb()),run(None)
    close(ours, plain, 0)
    assert len(ours[0])==64//bs

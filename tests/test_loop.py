"The loop over windows: tails, counts, overrides, removed callbacks, gradients that are cleared"
import pytest
from contextlib import nullcontext
from harness import *
from fastai_accum.patch import *

class Augmented(Items):
    "A dataset that draws random numbers for each item, as random item transforms do"
    def __getitem__(self, i):
        x,*y = super().__getitem__(i)
        return (x+.3*random.random(),*y)

@pytest.mark.parametrize('window', [dict(n_step=4), dict(n_samples=32)], ids=str)
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

@pytest.mark.parametrize('cb', [AccumulateStep(4), MicroBatch(3)], ids=str)
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

@pytest.mark.parametrize('cbs', [lambda: AccumulateStep(4), lambda: [AccumulateStep(4), MicroBatch(3)]],
                         ids=['acc','both'])
def test_an_override_of_do_grad_opt(cbs):
    "What follows `super()` runs once a window"
    def fit(learn): learn.__class__ = Follows; learn.fit_one_cycle(2)
    a,b = same(cbs, fit=fit)
    close(a.avg, b.avg)
    assert a.n==b.n==6

class Refused(Learner):
    def _do_one_batch(self):
        super()._do_one_batch()
        self.n_done = 1

def test_an_override_of_do_one_batch():
    "It would not be reached once a window, so it is refused by name"
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(4))
    learn.__class__ = Refused
    with pytest.raises(ValueError, match='_do_one_batch'): learn.fit(1)

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

@pytest.mark.parametrize('how', ['callback','patch'])
def test_lr_find_with_a_schedule(how, tmp_path):
    "On a fresh learner, which has no `epoch` yet; all windows are those of the schedule's beginning"
    window = dict(n_step=lambda pct: 4 if pct<.1 else 2)
    def find(bs, cbs=None):
        learn = make_learner(make_dls(96, bs, shuffle=False), cbs=cbs, path=tmp_path)
        learn.lr_find(num_it=20, show_plot=False, suggest_funcs=None, stop_div=False)
        return learn
    with accumulation(**window) if how=='patch' else nullcontext():
        a = find(8, AccumulateStep(**window) if how=='callback' else None)
    b = find(32)
    assert a.recorder.lrs==b.recorder.lrs and len(a.spy.steps)==20
    close(a.recorder.losses[:16], b.recorder.losses[:16])
    is_clean(a)

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

@pytest.mark.parametrize('event', ['before_batch','after_backward','after_batch'])
@pytest.mark.parametrize('cls', [AccumulateStep,MicroBatch])
def test_removed_in_mid_epoch(cls, event):
    "The windows end cleanly: this epoch goes on as it was planned, and the next one is without them"
    def remove(cb):
        if cb.training and cb.train_iter==1: cb.learn.remove_cbs(cb.learn.cbs.filter(lambda o: isinstance(o, cls)))
    learn = make_learner(make_dls(76, 8), cbs=[cls(4), Callback(**{event:remove})])
    learn.fit(2)
    is_clean(learn)
    assert len(learn.spy.steps)==(3+10 if cls is AccumulateStep
                                  else 20) and not learn.cbs.filter(lambda o: isinstance(o, cls))

@pytest.mark.parametrize('cls', [AccumulateStep,MicroBatch])
def test_one_instance_in_two_learners(cls):
    "As when `cbs` is shared by folds: the first one, which has lost it, raises when it trains"
    cb = cls(4)
    a,b = (make_learner(make_dls(64, 8), cbs=cb) for _ in range(2))
    with pytest.raises(ValueError, match='this instance is in another Learner too'): a.fit(1)
    b.fit(1)
    assert len(b.spy.steps)==(2 if cls is AccumulateStep else 8)

def test_a_window_begins_with_cleared_gradients():
    "Also those of a backward pass before the fit"
    def fit(learn):
        for p in learn.model.parameters(): p.grad = torch.ones_like(p)
        learn.fit(2)
    a,b = make_learner(make_dls(76, 8, shuffle=False),
                       cbs=AccumulateStep(4)),make_learner(make_dls(76, 32, shuffle=False))
    fit(a); b.fit(2)
    assert_same(a, b)

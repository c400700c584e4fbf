"The loop over windows: what is counted, tails, micro-batches that are left out, overrides, removed callbacks"
import pytest
from contextlib import nullcontext
from functools import partial
from harness import *
from fastai_accum.loop import Counts
from fastai_accum.patch import *

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

@each(how=['callback','patch'])
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

@drawn(8, cls=[AccumulateStep,MicroBatch],
       event='''before_epoch before_train before_batch after_loss after_backward before_step after_batch
                after_train'''.split())
def test_removed_in_mid_epoch(cls, event):
    "The windows end cleanly: this epoch goes on as it was planned, and the next one is without them"
    in_loop = event in 'before_batch after_loss after_backward before_step after_batch'
    def remove(cb):
        if cb.epoch==0 and (cb.train_iter==1 or not in_loop): cb.learn.remove_cbs(cb.learn.cbs.filter(risinstance(cls)))
    learn = make_learner(make_dls(76, 8), cbs=[cls(4), Callback(**{event:remove})])
    learn.fit(2)
    is_clean(learn)
    n = 10 if event in ('before_epoch','before_train') else 3 if cls is AccumulateStep else 10
    assert len(learn.spy.steps)==n+10 and not learn.cbs.filter(risinstance(cls))

@drawn(5, which=[AccumulateStep,MicroBatch], coupled=[False,True],
       event='before_batch after_loss after_backward before_step after_batch'.split())
def test_one_of_two_removed(which, event, coupled):
    "The other callback goes on, or skips the rest of the epoch"
    def remove(cb):
        if cb.training and cb.train_iter==1: cb.learn.remove_cb(which)
    learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4), MicroBatch(3, coupled=coupled),
                                                Callback(**{event:remove})])
    learn.fit(2)
    is_clean(learn)
    assert len(learn.spy.steps)>=6 and learn.recorder.values[1][0]<2

@each(cls=[AccumulateStep,MicroBatch])
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

def test_given_to_fit():
    a,_ = same(list, fit=lambda l: l.fit(2, cbs=AccumulateStep(4) if l.dls.train.bs==8 else None))
    assert not hasattr(a, 'accumulate_step')

def test_dropped_tail():
    "A dropped tail is thrown away unseen: nothing is computed for it"
    seen = []
    look = Callback(before_batch=lambda cb: seen.append(cb.micro.i) if cb.training else None)
    learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4, drop_last=True), look])
    learn.fit(1)
    assert seen==list(range(8))
    assert learn.accumulate_step.counts==Counts(8, 76, [32,32])
    assert learn.pct_train==1.

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

def test_a_callback_that_does_not_run():
    "One that has set its `run` to False stays off"
    cb = Callback(); cb.order = 55; cb.seen = []
    cb.before_fit = lambda: setattr(cb, 'run', False)
    cb.after_batch = lambda: cb.seen.append(1)
    learn = make_learner(make_dls(76, 8), cbs=[cb, AccumulateStep(4)])
    learn.fit(2)
    assert not cb.seen

@drawn(7, which=[{1}, {3}, {9}, {1,3,4,5}, {4,5,6,7}, {8,9}], order=[-1000,0,1000],
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

@drawn(5, at=[4,5,7,8,9], order=[-1000,1000])
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

def test_varying_batch_sizes():
    "Micro-batches of many sizes, counted in samples: the schedule goes by the share of batches seen"
    from torch.utils.data import DataLoader as TorchLoader, TensorDataset
    sizes = [3,9,1,14,5,8,20,2,2,6,10,7]
    n,cuts = sum(sizes),[0,*np.cumsum(sizes)]
    x,y = features(n),classes(n)
    parts = [list(range(a,b)) for a,b in zip(cuts,cuts[1:])]
    windows,left = [],[]
    for p in parts:
        left += [p]
        if sum(map(len,left))>=16: windows.append(left); left = []
    if left: windows.append(left)
    prebatched = DataLoader([(x[p],y[p]) for p in parts], bs=None)
    sampled = TorchLoader(TensorDataset(x,y), batch_sampler=parts)
    class Buckets(DataLoader):
        "A loader whose batches are smaller than its batch size"
        def __len__(self): return len(parts)
        def get_idxs(self): return list(range(n))
        def chunkify(self, b): b = list(b); return iter([[b[i] for i in p] for p in parts])
    for dl in prebatched, sampled, Buckets(Items(x, y), bs=20):
        learn = make_learner(make_dls(32, 8), cbs=AccumulateStep(n_samples=16), opt_func=SGD)
        learn.dls = DataLoaders(dl, learn.dls.valid)
        learn.fit_one_cycle(1)
        pcts,exact = [s['pct_train'] for s in learn.spy.steps],np.cumsum([0]+[len(w)/len(sizes) for w in windows[:-1]])
        assert rel(pcts, exact)[0]<=TOL
        assert learn.train_iter==len(windows)
        assert learn.accumulate_step.counts.n_stepped==n
        assert learn.recorder.lrs==learn.recorder.hps['lr'] and len(learn.recorder.lrs)==len(windows)

class LoseItem(Items):
    "A dataset that fails once, as a corrupt image does"
    def __getitem__(self, i):
        if i==44 and self.fail: self.fail = False; raise self.exc
        return super().__getitem__(i)

@each(exc=[OSError('truncated'), KeyboardInterrupt()])
def test_export_after_the_loader_failed(exc, tmp_path):
    "What is left after the loader has failed does not reach an exported, copied or going-on learner"
    ds = LoseItem(features(76), classes(76)); ds.fail,ds.exc = True,exc
    model = nn.Sequential(small_model(), nn.Dropout())
    learn = make_learner(DataLoaders(DataLoader(ds, bs=8), DataLoader(ds, bs=8)), model, cbs=AccumulateStep(4),
                         splitter=trainable_params)
    with pytest.raises(type(exc)): learn.fit(1)
    learn.remove_cb(Spy); learn.logger = print; learn.path = tmp_path; learn.export('a.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        loaded = load_learner(tmp_path/'a.pkl')
    dl = DataLoader(Items(features(24), classes(24)), bs=8)
    for l in (loaded, learn):
        a,b = (l.get_preds(dl=dl)[0] for _ in range(2))
        assert torch.equal(a, b), 'dropout is on'
        assert all(cb.run for cb in l.cbs) and not any(k=='after_batch' for cb in l.cbs for k in cb.__dict__
                                                       if not isinstance(cb, Spy))

@pytest.mark.parametrize('event,order', [('before_step',0), ('after_step',0), ('after_batch',55)])
def test_cancel_train_in_the_last_window(event, order):
    "`CancelTrainException` ends the epoch, also when the window is closed after the loader has ended early"
    def stop(cb):
        if cb.training and cb.train_iter==(3 if event=='after_batch' else 2): raise CancelTrainException
    def train(bs, cbs):
        cb = Callback(**{event:stop}); cb.order = order
        learn = make_learner(make_dls(92, bs, skip=tuple(range(20)), shuffle=False), cbs=[cb]+cbs)
        learn.fit(2)
        return learn
    a,b = train(8, [AccumulateStep(4)]),train(32, [])
    # fastai leaves the gradients of a cancelled step behind, so not the weights
    assert a.epoch==b.epoch==1 and rel(a.recorder.lrs, b.recorder.lrs)[0]<=TOL

def test_changed_during_a_fit():
    "The window can be changed, or accumulation be switched on, between epochs"
    def grow(cb):
        if cb.epoch: cb.learn.accumulate(4)
    a,b = (make_learner(make_dls(76, 8, shuffle=False), cbs=cbs, opt_func=SGD)
           for cbs in (Callback(before_epoch=grow), None))
    a.fit(2)
    b.fit(1)
    b.dls = make_dls(76, 32, shuffle=False); b.fit(1)
    assert rel(snapshot(a)['params'], snapshot(b)['params'])[0]<=TOL
    assert len(a.spy.steps)==10+3

@each(at=[2,3,4])
def test_validation_in_the_middle_of_a_window(at):
    """Wherever it is, the window keeps its gradients; fastai's `validate` leaves the learner in validation, and
    counts steps anew"""
    class Validates(Callback):
        run_valid = False
        def after_batch(self):
            if self.iter!=at: return
            dl,n_iter = self.dl,self.n_iter
            self.learn.validate()
            self.learn.dl,self.learn.n_iter,self.learn.iter,self.learn.training = dl,n_iter,at,True
            self.model.train()
    a,b = (make_learner(make_dls(76, bs), cbs=cbs) for bs,cbs in ((8,[AccumulateStep(4),Validates()]),(32,None)))
    for learn in (a,b): learn.fit(1, .02)
    close(*([s['grads'] for s in o.spy.steps] for o in (a,b)))
    assert len(b.spy.steps)==3

class WandbCallback(Callback):
    "What the callback of fastai does to its axis"
    order = Recorder.order+1
    def before_fit(self): self.axis = [0]
    def after_batch(self):
        if self.training: self.axis.append(self.axis[-1]+1/self.n_iter)

@each(kw=[dict(), dict(skip=range(68,76))])
def test_axis_of_wandb(kw):
    "An epoch is 1, also where the loader is shorter than its length and its tail is closed in `after_train`"
    learn = make_learner(make_dls(76, 8, shuffle=False, **kw), cbs=[AccumulateStep(4), WandbCallback()])
    learn.fit(2)
    n = len(learn.spy.steps)
    assert learn.wandb.axis==pytest.approx([i/3 for i in range(n+1)])

def test_axis_of_wandb_varying():
    "Where the number of windows is unknown the axis counts as it did"
    learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(n_samples=20), WandbCallback()])
    xs = [(features(n), classes(n)) for n in (8,3,9,12,8)]
    learn.dls = DataLoaders(DataLoader(xs, bs=None), DataLoader(xs[:1], bs=None))
    learn.fit(1)
    assert learn.wandb.axis==pytest.approx([0,.2,.4])

def test_terminate_on_nan_of_weight_0():
    "A micro-batch of weight 0 does not end training: its loss of NaN is not shown"
    y = classes(76); y[8:16] = -100
    same(lambda: AccumulateStep(4), also=TerminateOnNaNCallback, y=y)

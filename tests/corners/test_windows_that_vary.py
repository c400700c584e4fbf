"What is counted, micro-batches that are left out, and windows that do not end as planned"
import pytest
from functools import partial
from harness import *
from fastai_accum.loop import Counts
from fastai_accum.microbatch import MicroBatch

@pytest.mark.parametrize('order', [-math.inf, -1000, -10, 0, 50, 1000])
def test_before_step_at_any_order(order):
    """`before_step` and `after_step` run at boundaries only, at any order, and see finished gradients and the loss
    of the window"""
    def train(bs, cbs):
        seen = []
        def look(cb): seen.append([cb.learn.loss.item()] + [p.grad.clone() for p in cb.learn.model.parameters()])
        cb = Callback(before_step=look); cb.order = order
        learn = make_learner(make_dls(76, bs), cbs=[cb]+cbs)
        learn.fit(2)
        return seen
    a,b = train(8, [AccumulateStep(4)]),train(32, [])
    assert len(b)==6 and rel(a, b)[0]<=TOL

@pytest.mark.parametrize('order', [-math.inf, -20, -10, 0, 55])
def test_counters_move_when_fastai_moves_them(order):
    "With windows of one micro-batch, every callback sees `train_iter` and `pct_train` as in plain training"
    def train(cbs):
        cb = Callback(); cb.order = order; cb.seen = []
        cb.after_batch = lambda: cb.seen.append((cb.train_iter, cb.pct_train)) if cb.training else None
        make_learner(make_dls(76, 8), cbs=[cb]+cbs).fit(2)
        return cb.seen
    assert train([AccumulateStep(1)])==train([])

def test_given_to_fit():
    a,b = make_learner(make_dls(76, 8)),make_learner(make_dls(76, 32))
    a.fit(2, cbs=AccumulateStep(4)); b.fit(2)
    assert_same(a, b)
    assert not hasattr(a, 'accumulate_step')

def test_clip():
    fit = lambda l: l.fit_one_cycle(2)
    a,b = (make_learner(make_dls(76, bs), cbs=cbs)
           for bs,cbs in ((8,[GradientClip(.1),AccumulateStep(4)]), (32,[GradientClip(.1)])))
    fit(a); fit(b)
    assert_same(a, b)

def test_boundary_and_counts():
    log = []
    def look(cb):
        a = cb.accumulate_step
        if cb.training: log.append((a.is_boundary, a.window.n_micro, a.window.n_samples, a.counts.n_steps))
        else: assert not a.is_boundary
    learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4), Callback(before_batch=look)])
    learn.fit(1)
    assert log==[(i in (3,7,9), i%4+1, i%4*8, i//4) for i in range(10)]
    assert learn.accumulate_step.counts==Counts(10, 76, [32,32,12])
    learn.validate()
    assert learn.accumulate_step.counts.n_steps==3   # still there to be read

def test_dropped_tail():
    "A dropped tail is thrown away unseen: nothing is computed for it"
    seen = []
    look = Callback(before_batch=lambda cb: seen.append(cb.micro.i) if cb.training else None)
    learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4, drop_last=True), look])
    learn.fit(1)
    assert seen==list(range(8))
    assert learn.accumulate_step.counts==Counts(8, 76, [32,32])
    assert learn.pct_train==1.

@pytest.mark.parametrize('keep', [True, False])
def test_drop_last_decides(keep):
    "`drop_last` against the loader's own: a large loader over the same samples"
    n = 116
    a = make_learner(make_dls(n, 8, drop_last=keep, shuffle=False), cbs=AccumulateStep(4, drop_last=not keep))
    b = make_learner(make_dls(n, 32, shuffle=False, x=features(n), y=classes(n)))
    n_seen = n//8*8 if keep else n//32*32
    b.dls = DataLoaders(DataLoader(Items(features(n)[:n_seen], classes(n)[:n_seen]), bs=32), b.dls.valid)
    for l in (a,b): l.fit_one_cycle(2)
    assert_same(a, b)

@pytest.mark.parametrize('cb', [AccumulateStep(4), AccumulateStep(4, drop_last=True), MicroBatch(3)], ids=str)
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

@pytest.mark.parametrize('shuffle', [True, False])
def test_train_metrics(shuffle):
    "Metrics over the training set count every micro-batch with its own loss; the loss that is logged is the window's"
    def train(bs, cbs=None):
        learn = make_learner(make_dls(76, bs, shuffle=shuffle), cbs=cbs, metrics=[accuracy,Losses()],
                             opt_func=partial(SGD, mom=.9))
        learn.recorder.train_metrics = True
        learn.fit(2)
        return learn
    a,b = train(8, AccumulateStep(4)),train(32)
    # accuracy is a float32 mean in fastai
    assert_same(a, b, but=('values','final_record'))
    assert rel(a.recorder.values, b.recorder.values)[0]<1e-6
    i = a.recorder.metric_names.index('train_losses')-1
    assert rel(L(a.recorder.values).itemgot(i), L(b.recorder.values).itemgot(i))[0]<=TOL

@pytest.mark.parametrize('order', [-1000,-10,0,50,55,1000])
def test_after_batch_once_a_window(order):
    def log(order):
        cb = Callback(); cb.order = order; cb.seen = []
        cb.after_batch = lambda: cb.seen.append((cb.train_iter, cb.learn.loss.item())) if cb.training else None
        return cb
    def train(bs, cbs):
        cb = log(order)
        learn = make_learner(make_dls(76, bs), cbs=[cb]+cbs); learn.fit(2)
        return cb.seen
    a,b = train(8, [AccumulateStep(4)]),train(32, [])
    assert len(b)==6 and rel(a, b)[0]<=TOL

class NoValid(Callback):
    def before_validate(self): raise CancelValidException

class WandbCallback(Callback):
    "What the callback of fastai does to its axis"
    order = Recorder.order+1
    def before_fit(self): self.axis = [0]
    def after_batch(self):
        if self.training: self.axis.append(self.axis[-1]+1/self.n_iter)

@pytest.mark.parametrize('kw', [dict(), dict(skip=range(68,76))], ids=['boundary','after_train'])
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

def test_a_callback_that_does_not_run():
    "One that has set its `run` to False stays off"
    cb = Callback(); cb.order = 55; cb.seen = []
    cb.before_fit = lambda: setattr(cb, 'run', False)
    cb.after_batch = lambda: cb.seen.append(1)
    learn = make_learner(make_dls(76, 8), cbs=[cb, AccumulateStep(4)])
    learn.fit(2)
    assert not cb.seen

@pytest.mark.parametrize('order', [-1000, 0, 1000])
@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','before_backward'])
@pytest.mark.parametrize('which', [{1}, {3}, {9}, {1,3,4,5}, {4,5,6,7}, {8,9}], ids=str)
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
    assert rel(list(learn.model.parameters()), list(model.parameters()))[0]<=TOL
    n = learn.accumulate_step.counts
    left = sum(len(range(j*8, min(j*8+8,76))) for w in windows for j in w)
    assert (n.n_steps,n.n_stepped,n.n_thrown)==(sum(map(bool,windows)),left,76-left)

@pytest.mark.parametrize('at', [4,5,7,8,9])
@pytest.mark.parametrize('order', [-1000,1000])
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

def test_skipped_step():
    "A callback that skips the step of a window, as gradient scaling does, skips it once; the window is over"
    def skip(nth):
        def f(cb):
            if cb.train_iter==nth: raise CancelStepException
        return Callback(before_step=f)
    a,b = (make_learner(make_dls(76, bs), cbs=[skip(1)]+cbs) for bs,cbs in ((8,[AccumulateStep(4)]), (32,[])))
    for l in (a,b): l.fit(2)
    assert_same(a, b)
    assert a.accumulate_step.counts==Counts(20, 152, [32,0,12,32,32,12])

@pytest.mark.parametrize('exc', [CancelTrainException, CancelEpochException, CancelFitException])
@pytest.mark.parametrize('at', range(4,8))
def test_cut_short(exc, at):
    """A window cut short by a cancelled epoch, training or fit is thrown away and counted; what follows is not
    touched by it"""
    def stop(cb):
        if cb.training and cb.epoch==0 and cb.micro.i==at: raise exc
    a = make_learner(make_dls(76, 8, shuffle=False), cbs=AccumulateStep(4), opt_func=SGD, wd=0.)
    a.fit(1, cbs=EachMicro(after_batch=stop))
    n = a.accumulate_step.counts
    stepped = 64 if at==7 else 32
    assert (n.n_samples,n.n_stepped,n.n_thrown)==((at+1)*8, stepped, (at+1)*8-stepped)
    assert all(not p.grad.any() for p in a.model.parameters())
    b = make_learner(make_dls(76, 32, shuffle=False), opt_func=SGD, wd=0.)
    b.model.load_state_dict(a.model.state_dict())
    for l in (a,b): l.spy.steps = []; l.fit(1)
    assert_same(a, b)

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

def test_pytorch_loader():
    "PyTorch's own `DataLoader`, with and without a batch sampler"
    from torch.utils.data import DataLoader as TorchLoader, TensorDataset, BatchSampler, SequentialSampler
    ds = TensorDataset(features(76), classes(76))
    for make in (lambda bs: TorchLoader(ds, batch_size=bs), lambda bs: TorchLoader(ds, batch_size=bs, drop_last=True),
                 lambda bs: TorchLoader(ds, batch_sampler=BatchSampler(SequentialSampler(ds), bs, True))):
        a,b = (make_learner(DataLoaders(make(bs), TorchLoader(ds, batch_size=16)), cbs=cbs)
               for bs,cbs in ((8,AccumulateStep(4)), (32,None)))
        for l in (a,b): l.fit_one_cycle(2)
        assert_same(a, b)

def test_pickle_and_deepcopy(tmp_path):
    a,b = make_learner(make_dls(76, 8), cbs=AccumulateStep(4)),make_learner(make_dls(76, 32))
    for l in (a,b): l.fit(1)
    c = deepcopy(a)
    for l in (a,b,c): l.spy.steps = []; l.dls.train.rng = random.Random(0); l.fit(1)
    assert_same(a, b); assert_same(c, b)
    learn = make_learner(make_dls(76, 8), cbs=AccumulateStep(4))
    learn.remove_cb(Spy); learn.recorder.smooth_loss = AvgSmoothLoss(); learn.logger = print
    learn.path = tmp_path; learn.export('a.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert load_learner(tmp_path/'a.pkl').accumulate_step.n_step==4

class LoseItem(Items):
    "A dataset that fails once, as a corrupt image does"
    def __getitem__(self, i):
        if i==44 and self.fail: self.fail = False; raise self.exc
        return super().__getitem__(i)

@pytest.mark.parametrize('exc', [OSError('truncated'), KeyboardInterrupt()], ids=['error','ctrl_c'])
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

def test_penalty():
    """A penalty that a callback adds in `after_loss` is part of the gradient; in equal micro-batches exactly, and it
    is not logged"""
    def penalty(cb): cb.learn.loss_grad = cb.learn.loss_grad + 0.5*cb.learn.pred.pow(2).mean()
    a,b = (make_learner(make_dls(96, bs), cbs=[Callback(after_loss=penalty)]+cbs)
           for bs,cbs in ((8,[AccumulateStep(4)]), (32,[])))
    for l in (a,b): l.fit_one_cycle(2)
    assert_same(a, b)

def test_terminate_on_nan():
    "A micro-batch of weight 0 does not end training: its loss of NaN is not shown"
    y = classes(76); y[8:16] = -100
    runs = (8,[AccumulateStep(4)]), (32,[])
    a,b = (make_learner(make_dls(76, bs, y=y, shuffle=False), cbs=[TerminateOnNaNCallback()]+cbs) for bs,cbs in runs)
    for l in (a,b): l.fit(2)
    assert_same(a, b)

@pytest.mark.parametrize('at', [2,3,4])
def test_validation_in_the_middle_of_an_epoch(at):
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
    assert rel(*([s['grads'] for s in o.spy.steps] for o in (a,b)))[0]<=TOL and len(b.spy.steps)==3

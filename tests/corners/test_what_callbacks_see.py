"""What a callback sees between two batches is what it sees with the large batch; nothing in the callbacks here knows
of accumulation"""
import pytest
from dataclasses import dataclass
from harness import *
from fastai_accum.microbatch import *
from fastai_accum.patch import *

@dataclass
class Case:
    "A loader, what accumulates on it, and the batch that it stands for"
    cbs:object; n:int=76; bs:int=8; large:int=32; drop_last:bool=False; skip:tuple=()

cases = dict(
    kept       = Case(lambda: AccumulateStep(4)),
    dropped    = Case(lambda: AccumulateStep(4), drop_last=True),
    asked      = Case(lambda: AccumulateStep(4, drop_last=False), n=80),
    n_samples  = Case(lambda: AccumulateStep(n_samples=64), n=200, bs=24, large=72),
    shorter    = Case(lambda: AccumulateStep(4), n=92, skip=(3,14,15,33,60,61,62,63)),
    one        = Case(lambda: AccumulateStep(1), bs=32),
    micro      = Case(lambda: MicroBatch(5), bs=32),
    auto       = Case(lambda: MicroBatch(), bs=32),
    coupled    = Case(lambda: MicroBatch(5, coupled=True), bs=32),
    both       = Case(lambda: [AccumulateStep(4),MicroBatch(3)]),
    both_drop  = Case(lambda: [MicroBatch(3),AccumulateStep(4)], drop_last=True),
)
fits = dict(fit=lambda l: l.fit(2), one_cycle=lambda l: l.fit_one_cycle(3),
            lr_find=lambda l: l.lr_find(num_it=7, show_plot=False, suggest_funcs=None))

def pair(c, cbs=lambda: [], fit=lambda l: l.fit_one_cycle(2), path=None, **kwargs):
    "The learner that accumulates and the one with the large batch, trained"
    res = []
    for bs,more in (c.bs,L(c.cbs())),(c.large,L()):
        learn = make_learner(make_dls(c.n, bs, drop_last=c.drop_last, skip=c.skip, shuffle=False), cbs=L(cbs())+more,
                             path=path, **kwargs)
        fit(learn)
        res.append(learn)
    return res

@pytest.mark.parametrize('fit', fits)
@pytest.mark.parametrize('case', cases)
def test_every_event(case, fit, tmp_path):
    "Events, counters, the schedule and the loss, at orders around fastai's own"
    a,b = pair(cases[case], probes, fits[fit], tmp_path)
    la,lb = a.seen,b.seen
    assert [o[:-2] for o in la]==[o[:-2] for o in lb]
    assert rel([o[-2:] for o in la], [o[-2:] for o in lb])[0]<=TOL
    assert {o[0] for o in lb}>=set(events)-({'after_epoch'} if fit=='lr_find' else set())
    if fit!='lr_find': assert_same(a, b)

def test_by_the_patch():
    def train(bs, n):
        learn = make_learner(make_dls(76, bs, shuffle=False), cbs=probes())
        with accumulation(n): learn.fit_one_cycle(2)
        return learn.seen
    assert rel(train(8, 4), train(32, 1))[0]<=TOL

class Average(Callback):
    "An exponential average of the weights, updated in `after_batch`"
    def before_fit(self): self.avg = [p.detach().clone() for p in self.model.parameters()]
    def after_batch(self):
        if self.training:
            for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p.detach(), .3)

class EveryOther(Callback):
    "Does something every other batch, by `self.iter`"
    def before_fit(self): self.seen = []
    def after_batch(self):
        if self.training and self.iter%2==0:
            self.seen += [self.iter, self.n_iter, *(p.detach().clone() for p in self.model.parameters())]

class Noisy(Callback):
    "Changes the weights in `after_batch`"
    def after_batch(self):
        if self.training and self.iter==1: self.model[0].weight.data.mul_(.9)

class Validates(Callback):
    "Validates in the middle of an epoch, which leaves the learner in validation"
    run_valid = False
    def before_fit(self): self.seen = []
    def after_batch(self):
        if self.iter==1: self.learn.validate()

kept = 'dl iter n_iter epoch train_iter pct_train xb yb pred loss smooth_loss final_record'.split()

class Predicts(Callback):
    "Gets predictions in the middle of an epoch, and puts the learner back"
    run_valid,inner,event = False,False,'after_batch'
    def before_fit(self): self.seen = []
    def _predict(self):
        if self.iter%2: return
        was = {k:v for k,v in vars(self.learn).items() if k in kept}
        # validation sets it back
        recorder = {k:deepcopy(v) for k,v in vars(self.learn.recorder).items() if k!='learn'}
        self.seen += self.learn.get_preds(inner=self.inner)
        for k,v in was.items(): setattr(self.learn, k, v)
        vars(self.learn.recorder).update(recorder)
        self.learn.training = True
        self.model.train()
    def after_batch(self): self._predict()

class PredictsInside(Predicts):
    "The same within the fit, after the step"
    inner,after_batch = True,noop
    def after_step(self): self._predict()

callbacks = dict(average=Average, every=EveryOther, noisy=Noisy, validates=Validates, predicts=Predicts,
                 inside=PredictsInside)

@pytest.mark.parametrize('case', ['kept','dropped','n_samples','shorter','micro','coupled','both'])
@pytest.mark.parametrize('name', callbacks)
def test_callbacks(name, case):
    a,b = pair(cases[case], callbacks[name])
    assert_same(a, b, but=('final_record','values') if name=='validates' else ())
    for k in 'avg','seen':
        x,y = (getattr(l.cbs[[type(o) for o in l.cbs].index(callbacks[name])], k, []) for l in (a,b))
        assert rel(x, y)[0]<=TOL, k

@pytest.mark.parametrize('case', ['kept','micro','both'])
def test_each_micro_batch(case):
    "A class that wants `after_batch` at each micro-batch says so, and then sees each sample once"
    class Gathers(Callback):
        each_micro_batch = True
        def before_train(self): self.seen = []
        def after_batch(self):
            if self.training: self.seen.append(self.learn.pred.detach())
    class OnTheInstance(Gathers):
        each_micro_batch = False
        def __init__(self): self.each_micro_batch = True
    a,b = pair(cases[case], OnTheInstance, lambda l: l.fit(1, lr=0.))
    assert len(a.on_the_instance.seen)>len(b.on_the_instance.seen)
    a,b = pair(cases[case], Gathers, lambda l: l.fit(1, lr=0.))
    assert rel(torch.cat(a.gathers.seen), torch.cat(b.gathers.seen))[0]<=TOL and len(a.gathers.seen)>len(b.gathers.seen)

def test_last_micro_batch():
    "In `after_batch`, `xb`, `yb` and `pred` are those of the last micro-batch"
    sizes = []
    look = Callback(after_batch=lambda cb: sizes.append((len(cb.xb[0]), len(cb.yb[0]), len(cb.pred),
                                                         cb.accumulate_step.is_boundary)) if cb.training else None)
    make_learner(make_dls(76, 8, shuffle=False), cbs=[AccumulateStep(4), look]).fit(1)
    assert sizes==[(8,8,8,True),(8,8,8,True),(4,4,4,True)]

def test_boundary_of_a_short_loader():
    "`is_boundary` is true at the step and in `after_batch`, also where a window turned out to be the last"
    seen = []
    look = lambda cb: seen.append(cb.accumulate_step.is_boundary) if cb.training else None
    make_learner(make_dls(92, 8, skip=range(20), shuffle=False),
                 cbs=[AccumulateStep(4), Callback(before_step=look, after_step=look, after_batch=look)]).fit(1)
    assert seen==[True]*9

class Own(Learner):
    "Overrides what fastai's loop calls"
    def __init__(self, *args, **kwargs): self.calls = []; super().__init__(*args, **kwargs)
    def one_batch(self, i, b): self.calls.append('one_batch'); super().one_batch(i, b)
    def _backward(self): self.calls.append('_backward'); (self.loss_grad*2).backward()
    def _step(self): self.calls.append('_step'); super()._step()

@pytest.mark.parametrize('how', ['class','instance'])
def test_what_users_override(how):
    "Subclasses and methods put on the learner are used for each micro-batch, and the step once a window"
    def train(bs, cbs):
        learn = make_learner(make_dls(76, bs, shuffle=False), cbs=cbs)
        learn.calls = []
        if how=='class': learn.__class__ = Own
        else:
            for k in ('one_batch','_step'):
                setattr(learn, k,
                        partial(lambda k, f, *args: (learn.calls.append(k), f(*args))[1], k, getattr(learn, k)))
            learn._backward = lambda: (learn.calls.append('_backward'), (learn.loss_grad*2).backward())
        own = {k:vars(learn)[k] for k in ('one_batch','_backward','_step') if k in vars(learn)}
        learn.fit_one_cycle(2)
        assert all(vars(learn)[k] is v for k,v in own.items()) and '_with_events' not in vars(learn)
        return learn
    a,b = train(8, AccumulateStep(4)),train(32, None)
    assert_same(a, b)
    n_valid = 2*2
    count = lambda l: [l.calls.count(k)-(n_valid if 'one' in k else 0) for k in ('one_batch','_backward','_step')]
    assert count(a)==[20,20,6] and count(b)==[6,6,6]

def nothing_is_replaced(learn):
    is_clean(learn)
    return True

@pytest.mark.parametrize('cbs', [lambda: AccumulateStep(4), lambda: MicroBatch(3),
                                 lambda: [AccumulateStep(2),MicroBatch(3, coupled=True)]], ids=['acc','micro','both'])
@pytest.mark.parametrize('event',
                         'before_epoch before_train before_batch after_loss before_step after_batch after_train '
                         'before_validate after_validate after_epoch'.split())
def test_nothing_is_replaced_after_ctrl_c(event, cbs):
    def stop(cb): raise KeyboardInterrupt
    learn = make_learner(make_dls(64, 8), cbs=cbs())
    learn.fit(1)
    assert nothing_is_replaced(learn)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=Callback(**{event:stop}))
    assert nothing_is_replaced(learn)
    learn.fit(1); learn.validate()
    assert nothing_is_replaced(learn)

@pytest.mark.parametrize('cbs', [lambda: AccumulateStep(4), lambda: MicroBatch(3)], ids=['acc','micro'])
@pytest.mark.parametrize('event', 'before_epoch before_train before_batch after_batch after_train'.split())
def test_removed_in_the_middle(event, cbs):
    "Nothing is left of a callback that is removed, whenever it is, and training goes on without it"
    def remove(cb):
        if cb.epoch==0 and len(cb.learn.cbs)==n:
            cb.learn.remove_cbs(cb.learn.cbs.filter(lambda o: isinstance(o, (AccumulateStep,MicroBatch))))
    learn = make_learner(make_dls(64, 8), cbs=[*L(cbs()), Callback(**{event:remove})])
    n = len(learn.cbs)
    learn.fit(2)
    assert nothing_is_replaced(learn) and not hasattr(learn, 'accumulate_step') and len(learn.spy.steps)>=8

@pytest.mark.parametrize('when', ['after_batch','before_batch','after_epoch','before_validate'])
def test_saved_in_the_middle(when, tmp_path):
    "A learner that is exported, pickled or copied while it trains: what is replaced leaves itself out"
    import pickle
    copies = []
    def save(cb):
        if cb.epoch==0 and not copies: copies.append(pickle.dumps(cb.learn))
    learn = make_learner(make_dls(64, 8, shuffle=False), cbs=AccumulateStep(4))
    saver = type('Saver', (Callback,), {when: save, '__reduce__': lambda self: (Callback, ())})()
    learn.remove_cb(Spy)
    learn.fit(1, cbs=saver)
    other = pickle.loads(copies[0])
    other.add_cb(Spy())
    other.fit(1)
    assert len(other.spy.steps)==2

@pytest.mark.parametrize('event', ['before_batch','after_batch','before_train','after_epoch'])
def test_added_when_a_fit_has_begun(event):
    "From the next loop over batches on"
    def add(cb):
        if cb.training and not hasattr(cb.learn, 'accumulate_step'): cb.learn.accumulate(4)
    def add_later(cb):
        if cb.epoch==0: cb.learn.accumulate(4)
    learn = make_learner(make_dls(64, 8), cbs=Callback(**{event:add_later if event=='after_epoch' else add}))
    learn.fit(2)
    assert len(learn.spy.steps)==(4 if event=='before_train' else 8+2)
    assert learn.accumulate_step.counts.n_steps==len(learn.spy.steps)-(0 if event=='before_train' else 8)
    assert AccumulateStep(4).counts.n_steps==0

class Counter(Learner):
    "Does something after what it overrides, once a batch"
    n_batches = 0
    def _do_grad_opt(self):
        super()._do_grad_opt()
        self.n_batches += 1
        self.follow()
    def follow(self):
        with torch.no_grad():
            if not hasattr(self, 'avg'): self.avg = [p.clone() for p in self.model.parameters()]
            for a,p in zip(self.avg, self.model.parameters()): a.lerp_(p, .1)

@pytest.mark.parametrize('case', ['kept','dropped','n_samples','micro','both','coupled'])
def test_what_follows_in_an_override(case):
    "The last micro-batch makes the step, so what a subclass does after it is done once a window"
    def fit(learn): learn.__class__ = Counter; learn.fit_one_cycle(2)
    a,b = pair(cases[case], fit=fit)
    assert_same(a, b)
    assert a.n_batches==b.n_batches and rel(a.avg, b.avg)[0]<=TOL

class Once(Callback):
    "Sets a rate once, in the middle of a fit"
    run_valid = False
    def __init__(self, event): setattr(self, event, self._set)
    def before_fit(self): self.done = False
    def _set(self):
        if not self.done and self.train_iter==2: self.opt.set_hyper('lr', 1e-3); self.done = True
@pytest.mark.parametrize('event',
                         ['before_batch','after_pred','after_loss','after_backward','before_step','after_batch'])
def test_a_rate_that_is_set_once(event):
    a,b = pair(cases['kept'], lambda: Once(event), fit=lambda l: l.fit(2))
    assert_same(a, b)
    assert b.opt.hypers[-1]['lr']==1e-3

@pytest.mark.parametrize('event',
                         'before_fit before_epoch before_train after_train before_validate after_epoch'.split())
@pytest.mark.parametrize('how', ['with','summary'])
def test_entering_the_learner(event, how):
    "`with learn` and `learn.summary()` in the middle of a fit"
    def enter(cb):
        if getattr(cb.learn, 'epoch', 0) or hasattr(cb.learn, 'entered'): return
        cb.learn.entered = True
        kept = {k:v for k,v in vars(cb.learn).items()
                if k in ('dl','training','epoch','train_iter','pct_train','n_iter')}
        if how=='with':
            with cb.learn: pass
        else: cb.learn.summary()
        vars(cb.learn).update(kept)
        cb.model.train(cb.learn.training)
    a,b = pair(cases['kept'], lambda: Callback(**{event:enter}))
    assert rel(snapshot(a)['params'], snapshot(b)['params'])[0]<=TOL and len(a.spy.steps)==len(b.spy.steps)==6
    assert nothing_is_replaced(a)

def test_parameters_that_come_in_a_window():
    "A head that is added in the tail, with a new optimizer"
    class Grows(nn.Module):
        def __init__(self): super().__init__(); self.m = small_model()
        def forward(self, x): return self.m(x)+(self.extra(x) if hasattr(self, 'extra') else 0)
    def grow(cb):
        if cb.training and cb.train_iter==2 and not hasattr(cb.model, 'extra'):
            torch.manual_seed(1)
            cb.model.extra = nn.Linear(6,3).double()
            cb.learn.opt = SGD([list(cb.model.parameters())], lr=.1)
    res = []
    for bs,cbs in (8,[AccumulateStep(4)]),(32,[]):
        learn = make_learner(make_dls(76, bs, shuffle=False), Grows(), cbs=[Callback(before_batch=grow)]+cbs,
                             splitter=trainable_params, opt_func=SGD)
        learn.fit(1)
        res.append([p.detach() for p in learn.model.parameters()])
    assert len(res[1])==6 and rel(*res)[0]<=TOL

@pytest.mark.parametrize('coupled', [False,True])
@pytest.mark.parametrize('event', 'before_batch after_loss after_backward before_step after_batch'.split())
@pytest.mark.parametrize('which', [AccumulateStep,MicroBatch])
def test_one_of_two_removed(which, event, coupled):
    "The other callback goes on, or skips the rest of the epoch"
    def remove(cb):
        if cb.training and cb.train_iter==1: cb.learn.remove_cb(which)
    learn = make_learner(make_dls(76, 8), cbs=[AccumulateStep(4), MicroBatch(3, coupled=coupled),
                                                Callback(**{event:remove})])
    learn.fit(2)
    assert nothing_is_replaced(learn) and len(learn.spy.steps)>=6 and learn.recorder.values[1][0]<2

@pytest.mark.parametrize('n_step', [2,4,6])
def test_batches_in_memory(n_step):
    "No more batches of the loader are alive than in plain training"
    import weakref
    def most(cbs):
        refs,seen = [],[]
        class Loader(DataLoader):
            def __iter__(self):
                for b in super().__iter__(): refs.append(weakref.ref(b[0])); yield b
        def look(cb): seen.append(sum(r() is not None for r in refs)) if cb.training else None
        dls = DataLoaders(Loader(Items(features(96), classes(96)), bs=8),
                          DataLoader(Items(features(16), classes(16)), bs=16))
        make_learner(dls, cbs=[*cbs,Callback(after_backward=look)]).fit(1)
        return max(seen)
    assert most([AccumulateStep(n_step)])<=most([])

def test_each_micro_batch_is_seen():
    "Also a micro-batch that seemed to be the last of its window, and was not"
    class Sees(Callback):
        each_micro_batch,run_valid,n = True,False,0
        def after_batch(self): self.n += 1
    def cancel(cb):
        if cb.training and cb.micro.i==3: raise CancelBatchException
    class Longer(DataLoader):
        def __len__(self): return super().__len__()//2
    dls = make_dls(96, 8)
    learn = make_learner(DataLoaders(Longer(Items(features(96), classes(96)), bs=8), dls.valid),
                         cbs=[Sees(), AccumulateStep(4, drop_last=False)])
    learn.fit(1)
    assert learn.sees.n==12
    learn = make_learner(make_dls(80, 8), cbs=[Sees(), AccumulateStep(n_samples=32), Callback(before_batch=cancel)])
    learn.fit(1)
    assert learn.sees.n==10

@pytest.mark.parametrize('exc,event', [(CancelTrainException,'after_train'),(CancelValidException,'after_train'),
                                       (CancelEpochException,'after_epoch'),(CancelTrainException,'after_epoch')])
def test_cancels_that_nobody_catches(exc, event):
    def cancel(cb): raise exc
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(4))
    learn.fit(1)
    with pytest.raises(exc): learn.fit(1, cbs=Callback(**{event:cancel}))
    assert nothing_is_replaced(learn)

def test_a_slice_that_is_left_out():
    "With `n_samples` the window goes on until enough are in, also if a slice of its last batch was left out"
    def drop(cb):
        if cb.training and cb.micro.i==4: raise CancelBatchException
    learn = make_learner(make_dls(96, 8, shuffle=False),
                         cbs=[AccumulateStep(n_samples=24), MicroBatch(4), Callback(after_loss=drop)])
    learn.fit(1)
    n = learn.accumulate_step.counts
    assert (n.n_stepped,n.n_thrown,n.n_steps)==(92,4,4)   # 28 in the first window, then 24, 24 and 16

@pytest.mark.parametrize('kw', [{}, dict(coupled=True), dict(exact=True)], ids=str)
def test_hooks_into_modules(kw):
    "The training is exact. Plain slices have an entry each; else it is that of the first slice, which runs again last"
    def run(bs, *cbs):
        learn = make_learner(make_dls(64, bs, shuffle=False), cbs=[ActivationStats(),*cbs], splitter=trainable_params)
        learn.fit(1)
        return learn
    a,b,sliced = run(32, MicroBatch(8, **kw)),run(32),run(8, AccumulateStep(4))
    assert_same(a, b)
    slices,ours,whole = ([o[0]['mean'] for o in l.activation_stats.stats] for l in (sliced,a,b))
    close(ours[0], slices[0], 1e-6)
    assert len(whole)==2 and len(ours)==(2 if kw else 8)
    assert not kw or abs(ours[0]-whole[0])>1e-3

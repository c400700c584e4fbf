"""Nothing leaks: a table of endings × what comes next.

A fit of three windows an epoch (4, 4 and 2 micro-batches) is ended in one of many ways. What comes next is done with that learner, and with a plain one
restored to the point where the first was left, at the batch size that the first one now stands for. Both have to give the same. `make test` takes each ending
with the followers that matter most, and each follower with the endings that differ most; `make test-all` the whole table."""
import pickle,pytest
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from harness import *
from fastai_accum.patch import *

N,BS,LARGE = 76,8,32
MID,BOUNDARY,LAST = 5,7,9   # micro-batches: in the second window, its boundary, and the boundary of the tail
drawn,windows = np.minimum(np.arange(1,11)*BS, N),{MID:32, BOUNDARY:32, LAST:12}

class Data(Items):
    "Samples; one of them fails to load while `exc` is set"
    exc = None
    def __getitem__(self, i):
        if Data.exc is not None and i==MID*BS+3: raise Data.exc('ended')
        return super().__getitem__(i)
    def new_empty(self): return Data(self.x[:0], tuple(o[:0] for o in self.y))

class Show(TfmdDL):
    "A loader that keeps what it is asked to show"
    def show_results(self, b, out, max_n=9, **kwargs): Show.shown = b,out

def learner(bs, path, cbs=None, **kwargs):
    x,y = features(N),classes(N)
    path.mkdir(exist_ok=True)
    return make_learner(DataLoaders(Show(Data(x, y), bs=bs, num_workers=0), Show(Items(x[:24], (y[:24],)), bs=16, num_workers=0)), cbs=cbs, path=path, **kwargs)

# Endings

everywhere = 'before_batch after_pred after_loss before_backward after_backward before_step after_step after_batch'.split()
unseen = everywhere[:4]            # the micro-batch has not been through its backward pass
late = 'before_step','after_step'  # at a boundary only
caught = dict(CancelBatchException=everywhere[:-1], CancelBackwardException=['before_backward'], CancelStepException=['before_step'],
              CancelTrainException=everywhere, CancelEpochException=everywhere, CancelFitException=everywhere)
failures = [OSError, KeyboardInterrupt, getattr(torch.cuda, 'OutOfMemoryError', RuntimeError)]

@dataclass(eq=False)
class Ending:
    "`exc` is raised in the micro-batch `at`: by a callback of `order` at an event, or at another place"
    where:str; exc:type=None; at:int=MID; order:float=0

    @property
    def nm(self): return getattr(self.exc, '__name__', 'normal')
    @property
    def is_caught(self): return self.exc is None or self.where in caught.get(self.nm, [])
    @property
    def goes_on(self): return self.is_caught and self.nm in ('normal','CancelBatchException','CancelBackwardException','CancelStepException')
    def __str__(self): return self.where if self.exc is None else f'{self.nm}-{self.where}-{self.at}-{self.order}'

    def run(self, learn, fit):
        "Run `fit(cbs)`, and let it end in this way"
        def fail(*args):
            if learn.training and learn.epoch==0 and learn.micro.i==self.at: raise self.exc('ended')
        cbs,(loss,forward) = [],(learn.loss_func,learn.model.forward)
        if self.where in everywhere: cbs = [(EachMicro if self.at==MID else Callback)(**{self.where:fail})]; cbs[0].order = self.order
        if self.where=='loader':    Data.exc = self.exc
        if self.where=='model':     learn.model.forward = lambda *x: (fail(), forward(*x))[1]
        if self.where=='loss':      learn.loss_func = lambda *x: (fail(), loss(*x))[1]
        if self.where=='backward':  learn._backward = lambda: (learn.loss_grad.backward(), fail())
        if self.where=='optimizer': learn._step = lambda: (fail(), learn.opt.step())
        try: fit(cbs)
        except BaseException as e: assert type(e) is self.exc, f'{e!r} instead of {self.exc}'
        else: assert self.is_caught, f'{self} did not raise'
        finally:
            Data.exc,learn.loss_func = None,loss
            for o,k in (learn.model,'forward'),(learn,'_backward'),(learn,'_step'): o.__dict__.pop(k, None)

    @property
    def stepped(self): return self.at!=MID and self.where in ('after_step','after_batch')

    def plain(self):
        "The ending that leaves the same weights when training in large batches. An open window is thrown away, though plain fastai would keep its gradients"
        where = self.where if self.goes_on else 'after_batch' if self.stepped else 'before_batch'
        return Ending(where, self.exc if self.is_caught else KeyboardInterrupt, self.at//4, self.order) if self.exc else self

    def counts(self, n_epoch):
        "Samples drawn and samples stepped in a fit, by hand"
        if self.exc is None: return N*n_epoch,N*n_epoch
        if self.goes_on:
            lost = drawn[self.at]-drawn[self.at-1] if self.where in unseen else windows[self.at]
            is_end = n_epoch==1 and self.at==LAST and self.where=='before_step'
            if self.nm=='CancelBatchException' and self.where not in unseen and not is_end: lost = 0   # goes into the next step
            return N*n_epoch,N*n_epoch-lost
        more = N*(n_epoch-1) if self.is_caught and self.nm!='CancelFitException' else 0   # the epochs that follow
        return drawn[self.at - (self.where=='loader')]+more,min(N, 32*(1 + (self.at==LAST) + self.stepped))+more

def make_endings():
    yield Ending('normal')
    for nm,events in caught.items():
        for where,at,order in itertools.product(events, (MID,BOUNDARY,LAST), (-1000,1000)):
            if at==MID and (where in late or where=='after_batch' and order>0): continue   # not reached
            yield Ending(where, globals()[nm], at, order)
        for where,at in itertools.product(everywhere, (MID,BOUNDARY)):   # not caught there: a plain error
            if where not in events and not (at==MID and where in late): yield Ending(where, globals()[nm], at)
    for exc in failures:
        places = everywhere if exc is KeyboardInterrupt else ['before_batch','before_step','after_batch']
        for where,at in itertools.product(places + ['loader','model','loss','backward','optimizer'], (MID,BOUNDARY)):
            if not (at==MID and where in (*late,'optimizer') or at==BOUNDARY and where=='loader'): yield Ending(where, exc, at)

# What comes next: called with the learner, each returns what is to be compared

def frozen(l): l.freeze(); l.fit(1); l.unfreeze(); l.fit(1, slice(1e-3,1e-2))
def find(l): return list(l.lr_find(num_it=24, show_plot=False, suggest_funcs=[valley,slide,minimum,steep]))
def predict(l): return [l.predict((features(3)[i], classes(3)[i]))[1:] for i in range(2)]
def show(l): l.show_results(shuffle=False); return Show.shown
def save(l): l.save('a'); l.fit(1); l.load('a'); l.fit(1)

def export(l):
    "The loss function is as it was, and the loaded learner predicts and trains"
    l.logger = print
    with l.removed_cbs(l.spy), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        l.export('a.pkl')
        other = load_learner(l.path/'a.pkl')
    assert type(other.loss_func) is nn.CrossEntropyLoss and vars(other.loss_func).keys()==vars(l.loss_func).keys() and other.loss_func.reduction=='mean'
    l.logger = other.logger = noop
    other.dls = l.dls; other.add_cb(Spy()); other.create_opt(); other.opt.load_state_dict(l.opt.state_dict())
    return [other.get_preds(dl=l.dls.valid)[0], train(other)]

def train(l): l.fit(1); is_clean(l); return snapshot(l)
def new_learner(l): return train(learner(LARGE, l.path, model=l.model))
def deep_copy(l): return train(deepcopy(l))
def pickled(l):
    with warnings.catch_warnings():
        if ismin_torch('2.6'): warnings.filterwarnings('error', '.*hook')   # older ones overlook the mark that a hook need not be kept
        return train(pickle.loads(pickle.dumps(l)))

followers = dict(fit=Self.fit(1), fit_one_cycle=Self.fit_one_cycle(1), lr_find=find, validate=Self.validate(), get_preds=Self.get_preds(), predict=predict,
                 show_results=show, export=export, save=save, freeze=frozen, deepcopy=deep_copy, pickle=pickled,
                 new_learner=new_learner, remove_cb=lambda l: l.remove_cb(AccumulateStep).fit(1), turn_off=Self.fit(1), stay_on=Self.fit(1))

# The table

def end(ending, path, patched=False, fit=lambda l,cbs: l.fit(1, cbs=cbs)):
    "A learner whose fit ended in this way, with accumulation by callback or by patch"
    learn = learner(BS, path, None if patched else AccumulateStep(4))
    with accumulation(4) if patched else nullcontext(): ending.run(learn, lambda cbs: fit(learn, cbs))
    return learn

def restore(b, a):
    "Bring `b` to the point where `a` was left"
    b.fit(1)   # leaves gradients of zero, as any training does
    b.model.load_state_dict(a.model.state_dict()); b.opt.load_state_dict(deepcopy(a.opt.state_dict()))
    for l in (a,b): l.spy.steps = []

def is_clean(learn):
    "No gradient, and no trace of what was replaced"
    assert not any(p.grad.any() for p in learn.model.parameters() if p.grad is not None)
    for cb in learn.cbs:
        if isinstance(cb, AccumulateStep): assert cb.window is None and cb._fit is None and cb._replaced is None
    assert type(learn.loss_func) is nn.CrossEntropyLoss and not {'all_batches','_with_events'} & set(vars(learn))

def fails_alike(e, ending, f, path):
    "After plain training that ended in this way, `f` fails too, with the same error"
    c = learner(LARGE, path)
    ending.plain().run(c, lambda cbs: c.fit(1, cbs=cbs))
    with pytest.raises(type(e), match=re.escape(str(e)[:40])): f(c)

def check(ending, follower, path, **kwargs):
    patched,f = follower in ('turn_off','stay_on'),followers[follower]
    a,b = end(ending, path/'a', patched, **kwargs),learner(BS if follower in ('remove_cb','turn_off') else LARGE, path/'b')
    is_clean(a)
    restore(b, a)
    with accumulation(4) if follower=='stay_on' else nullcontext():
        try: ra = f(a)
        except RuntimeError as e:
            if follower!='deepcopy' or ending.exc is None: raise
            fails_alike(e, ending, f, path/'c')
            ra,f = None,lambda l: None
        a.fit(1)
    rb = f(b); b.fit(1)
    err,where = rel(ra, rb)
    assert err<=TOL, f'relative error {err:.2e} at {where}'
    assert_same(a, b)
    is_clean(a)

table = list(make_endings())
often = 'fit','turn_off'
def is_telling(e):
    if e.exc is None or e.order<0: return e.exc is None
    return e.where in dict(KeyboardInterrupt=['after_batch','before_step','loader'], OutOfMemoryError=['model','backward'], OSError=['loss'],
                           CancelFitException=['after_backward'], CancelBatchException=late if e.at==LAST else []).get(e.nm, [])

def slow_unless(fast, *args): return pytest.param(*args, id='-'.join(map(str,args)), marks=() if fast else pytest.mark.slow)

@pytest.mark.parametrize('ending,follower', [slow_unless(f in often or is_telling(e), e, f) for e in table for f in followers])
def test_table(ending, follower, tmp_path): check(ending, follower, tmp_path)

@pytest.mark.parametrize('n_epoch', [1,2])
@pytest.mark.parametrize('ending', table, ids=str)
def test_what_is_left(ending, n_epoch, tmp_path):
    "Samples are accounted for, and weights, optimizer state and hyper-parameters are those that the large batch leaves, also after the epochs that follow"
    a,b = end(ending, tmp_path/'a', fit=lambda l,cbs: l.fit(n_epoch, cbs=cbs)),learner(LARGE, tmp_path/'b')
    n,(seen,stepped) = a.accumulate_step.counts,ending.counts(n_epoch)
    assert (n.n_samples,n.n_stepped,n.n_thrown)==(seen,stepped,seen-stepped)
    is_clean(a)
    if ending.goes_on and ending.exc and ending.where not in late: return   # a micro-batch is gone and not its window: the large batch has no such ending
    ending.plain().run(b, lambda cbs: b.fit(n_epoch, cbs=cbs))
    a,b = ([list(l.model.parameters()), opt_state(l.opt), l.opt.hypers] for l in (a,b))
    assert rel(a, b)[0]<=TOL, rel(a, b)

@pytest.mark.parametrize('wrapped', [True, False], ids=['OptimWrapper','Optimizer'])
@pytest.mark.parametrize('at', [1,MID])
def test_gradients_that_were_none(at, wrapped, tmp_path):
    "After an exception gradients are as `zero_grad` leaves them, and as they were before the fit if no step was made"
    opt_func = partial(OptimWrapper, opt=torch.optim.SGD) if wrapped else SGD
    a,b = (learner(BS, tmp_path, cbs, opt_func=opt_func) for cbs in (AccumulateStep(4),None))
    def grads(l): return {None if p.grad is None else p.grad.any().item() for p in l.model.parameters()}
    Ending('backward', KeyboardInterrupt, at).run(a, lambda cbs: a.fit(1))
    b.fit(1)
    assert grads(a)==({None} if at==1 else grads(b))

@pytest.mark.parametrize('exc', [KeyboardInterrupt, OSError, CancelTrainException, CancelEpochException, CancelFitException])
@pytest.mark.parametrize('event', ['before_step','after_step'])
def test_closed_after_the_loader(event, exc, tmp_path):
    "The loader is shorter than it said, so its last window is closed in `after_train`; what is raised there leaves nothing either"
    def fail(cb):
        if cb.epoch==0 and cb.learn.accumulate_step.window.n_micro==3: raise exc('ended')
    a = learner(BS, tmp_path, [AccumulateStep(4), Callback(**{event:fail})])
    a.dls = make_dls(92, BS, skip=range(36), shuffle=False)   # 7 micro-batches instead of 12
    with nullcontext() if exc.__name__.startswith('Cancel') else pytest.raises(exc): a.fit(1)
    is_clean(a)
    n = a.accumulate_step.counts
    assert n.n_samples==n.n_stepped+n.n_thrown==56

def test_added_in_an_epoch_that_is_cut_short(tmp_path):
    "A callback that is added when an epoch has begun: its window reaches neither the next epoch nor the next fit"
    def grow(cb):
        if cb.epoch==0: cb.learn.accumulate(4)
    def stop(exc):
        def f(cb):
            if cb.training and cb.epoch==0 and cb.micro.i==MID: raise exc
        return Callback(after_backward=f)
    a,b = (learner(BS, tmp_path, Callback(before_epoch=grow)) for _ in range(2))
    a.fit(2, cbs=stop(CancelEpochException))
    n = a.accumulate_step.counts
    assert (n.n_samples,n.n_stepped,n.n_thrown)==(48+N, 32+N, 16)
    with pytest.raises(KeyboardInterrupt): b.fit(2, cbs=stop(KeyboardInterrupt))
    b.validate()
    is_clean(b)

def test_set_aside_and_interrupted(tmp_path):
    "Gradients that a cancelled step leaves to the next window do not reach the next fit if there is no next window"
    def cancel(cb):
        if cb.epoch==0 and cb.micro.i==3: raise CancelBatchException
    def stop(cb):
        if cb.training and cb.micro.i==MID: raise KeyboardInterrupt
    a,b = learner(BS, tmp_path/'a', AccumulateStep(4)),learner(LARGE, tmp_path/'b')
    with pytest.raises(KeyboardInterrupt): a.fit(1, cbs=[Callback(before_step=cancel), Callback(after_backward=stop)])
    n = a.accumulate_step.counts
    assert (n.n_samples,n.n_stepped,n.n_thrown)==(48,0,48)
    restore(b, a)
    for l in (a,b): l.fit(1)
    assert_same(a, b)

find_endings = [e for e in table if not e.is_caught]

@pytest.mark.parametrize('ending,follower', [slow_unless(f in often and is_telling(e), e, f) for e in find_endings for f in followers])
def test_interrupted_lr_find(ending, follower, tmp_path):
    "What fastai itself leaves behind stays: the weights and rates of the search. Nothing of the accumulation stays"
    def fit(l, cbs):
        with l.added_cbs(cbs): l.lr_find(num_it=20, show_plot=False)
    check(ending, follower, tmp_path, fit=fit)

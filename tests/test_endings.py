"""Nothing leaks: a table of endings × what comes next.

A fit of three windows an epoch (4, 4 and 2 micro-batches) is ended in one of many ways. What comes next is done with
that learner, and with a plain one restored to the point where the first was left, at the batch size that the first one
now stands for. Both have to give the same. A sample of the table is drawn; `make sweep` runs all of it."""
import pickle,pytest,sys
from contextlib import nullcontext,suppress
from dataclasses import dataclass
from harness import *
from fastai_accum.all import *
from fastai_accum import state

N,BS,LARGE = 76,8,32
MID,BOUNDARY,LAST = 5,7,9   # micro-batches: in the second window, its boundary, and the boundary of the tail
arrived,windows = np.minimum(np.arange(1,11)*BS, N),{MID:32, BOUNDARY:32, LAST:12}

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
    return make_learner(DataLoaders(Show(Data(x, y), bs=bs, num_workers=0),
                                    Show(Items(x[:24], (y[:24],)), bs=16, num_workers=0), device=here.device),
                        cbs=cbs, path=path, **kwargs)

# Endings

everywhere = """before_batch after_pred after_loss before_backward after_backward
before_step after_step after_batch""".split()
unseen = everywhere[:4]            # the micro-batch has not been through its backward pass
late = 'before_step','after_step'  # at a boundary only
caught = dict(CancelBatchException=everywhere[:-1], CancelStepException=['before_step'],
              CancelTrainException=everywhere, CancelEpochException=everywhere, CancelFitException=everywhere)
failures = [OSError, KeyboardInterrupt, torch.OutOfMemoryError]

@dataclass(eq=False)
class Ending:
    "`exc` is raised in the micro-batch `at`: by a callback of `order` at an event, or at another place"
    where:str; exc:type=None; at:int=MID; order:float=0

    @property
    def nm(self): return getattr(self.exc, '__name__', 'normal')
    @property
    def is_caught(self): return self.exc is None or self.where in caught.get(self.nm, [])
    @property
    def goes_on(self): return self.is_caught and self.nm in ('normal','CancelBatchException','CancelStepException')
    def __str__(self): return self.where if self.exc is None else f'{self.nm}-{self.where}-{self.at}-{self.order}'

    def run(self, learn, fit):
        "Run `fit(cbs)`, and let it end in this way"
        def fail(*args):
            if learn.training and learn.epoch==0 and learn.micro.i==self.at: raise self.exc('ended')
        cbs,(loss,forward) = [],(learn.loss_func,learn.model.forward)
        if self.where in everywhere:
            cbs = [(EachMicro if self.at==MID else Callback)(**{self.where:fail})]
            cbs[0].order = self.order
        if self.where=='loader':    Data.exc = self.exc
        if self.where=='model':     learn.model.forward = lambda *x: (fail(), forward(*x))[1]
        if self.where=='loss':      learn.loss_func = lambda *x: (fail(), loss(*x))[1]
        if self.where=='backward':  learn._backward = lambda: (learn.loss_grad.backward(), fail())
        if self.where=='optimizer': learn._step = lambda: (fail(), learn.opt.step())
        err = RuntimeError if self.nm=='CancelBackwardException' and self.where=='before_backward' else self.exc
        try: fit(cbs)
        except BaseException as e: assert type(e) is err, f'{e!r} instead of {err}'
        else: assert self.is_caught, f'{self} did not raise'
        finally:
            Data.exc,learn.loss_func = None,loss
            for o,k in (learn.model,'forward'),(learn,'_backward'),(learn,'_step'): o.__dict__.pop(k, None)

    @property
    def stepped(self): return self.at!=MID and self.where in ('after_step','after_batch')   # though it is not counted

    def plain(self):
        "The ending that leaves the same weights when training in large batches: an open window is thrown away"
        if self.exc is None: return self
        where = self.where if self.goes_on else 'after_batch' if self.stepped else 'before_batch'
        return Ending(where, self.exc if self.is_caught else KeyboardInterrupt, self.at//4, self.order)

    def counts(self, n_epoch):
        "Samples drawn and samples stepped in a fit, by hand"
        if self.exc is None: return N*n_epoch,N*n_epoch
        if self.goes_on:
            lost = arrived[self.at]-arrived[self.at-1] if self.where in unseen else windows[self.at]
            return N*n_epoch,N*n_epoch-(0 if self.where=='after_step' else lost)
        stepped = min(N, 32*(1 + (self.at==LAST) + (self.stepped and self.where=='after_batch')))
        more = N*(n_epoch-1) if self.is_caught and self.nm!='CancelFitException' else 0   # the epochs that follow
        return arrived[self.at - (self.where=='loader')]+more,stepped+more

def make_endings():
    yield Ending('normal')
    for nm,events in caught.items():
        for where,at,order in itertools.product(events, (MID,BOUNDARY,LAST), (-1000,1000)):
            if at==MID and (where in late or where=='after_batch' and order>0): continue   # not reached
            yield Ending(where, globals()[nm], at, order)
    for nm in *caught,'CancelBackwardException':
        for where,at in itertools.product(everywhere, (MID,BOUNDARY)):   # not caught there: a plain error
            if where in caught.get(nm, ()) or at==MID and where in late: continue
            # in `after_batch` of a micro-batch: its window is left out
            if nm=='CancelBatchException' and at==MID: continue
            yield Ending(where, globals()[nm], at)
    for exc in failures:
        places = everywhere if exc is KeyboardInterrupt else ['before_batch','before_step','after_batch']
        for where,at in itertools.product(places + ['loader','model','loss','backward','optimizer'], (MID,BOUNDARY)):
            no_step = at==MID and where in (*late,'optimizer')
            if not (no_step or at==BOUNDARY and where=='loader'): yield Ending(where, exc, at)

# What comes next: called with the learner, each returns what is to be compared

def frozen(l): l.freeze(); l.fit(1); l.unfreeze(); l.fit(1, slice(1e-3,1e-2))
def find(l): return list(l.lr_find(num_it=24, show_plot=False, suggest_funcs=[valley,slide,minimum,steep]))
def predict(l): return [l.predict((features(3)[i], classes(3)[i]))[1:] for i in range(2)]
def show(l): l.show_results(shuffle=False); return Show.shown
def save(l): l.save('a'); l.fit(1); l.load('a'); l.fit(1)

def export(l):
    "The loss function is as it was, and the loaded learner predicts and trains"
    l.logger = print
    with l.removed_cbs(l.spy), warnings.catch_warnings(action='ignore'):
        l.export('a.pkl')
        other = load_learner(l.path/'a.pkl')
    loss = other.loss_func
    assert type(loss) is nn.CrossEntropyLoss and vars(loss).keys()==vars(l.loss_func).keys() and loss.reduction=='mean'
    l.logger = other.logger = noop
    ours = [AccumulateStep(o.n_step) for o in l.cbs.filter(risinstance(AccumulateStep))]   # which the file leaves out
    other.dls = l.dls; other.add_cbs([*ours, Spy()]); other.create_opt(); other.opt.load_state_dict(l.opt.state_dict())
    return [other.get_preds(dl=l.dls.valid)[0], train(other)]

def train(l): l.fit(1); is_clean(l); return snapshot(l)
def new_learner(l): return train(learner(LARGE, l.path, model=l.model))
def deep_copy(l): return train(deepcopy(l))
def pickled(l):
    with warnings.catch_warnings():
        warnings.filterwarnings('error', '.*hook')
        return train(pickle.loads(pickle.dumps(l)))

followers = dict(fit=Self.fit(1), fit_one_cycle=Self.fit_one_cycle(1), lr_find=find, validate=Self.validate(),
                 get_preds=Self.get_preds(), predict=predict, show_results=show, export=export, save=save,
                 freeze=frozen, deepcopy=deep_copy, pickle=pickled, new_learner=new_learner,
                 remove_cb=lambda l: l.remove_cb(AccumulateStep).fit(1), turn_off=Self.fit(1), stay_on=Self.fit(1))

# The table

def end(ending, path, patched=False, fit=lambda l,cbs: l.fit(1, cbs=cbs)):
    "A learner whose fit ended in this way, with accumulation by callback or by patch"
    learn = learner(BS, path, None if patched else AccumulateStep(4))
    with accumulation(4) if patched else nullcontext(): ending.run(learn, lambda cbs: fit(learn, cbs))
    is_clean(learn)
    assert type(learn.loss_func) is nn.CrossEntropyLoss
    return learn

def restore(b, a):
    "Bring `b` to the point where `a` was left"
    b.fit(1)   # leaves gradients of zero, as any training does
    b.model.load_state_dict(a.model.state_dict()); b.opt.load_state_dict(deepcopy(a.opt.state_dict()))
    for l in (a,b): l.spy.steps = []

def fails_alike(e, ending, f, path):
    "After plain training that ended in this way, `f` fails too, with the same error"
    c = learner(LARGE, path)
    ending.plain().run(c, lambda cbs: c.fit(1, cbs=cbs))
    with pytest.raises(type(e), match=re.escape(str(e)[:40])): f(c)

def follow(ending, follower, path, **kwargs):
    "After `ending` the follower gives what it gives with a plain learner"
    patched,f = follower in ('turn_off','stay_on'),followers[follower]
    a,b = end(ending, path/'a', patched, **kwargs),learner(BS if follower in ('remove_cb','turn_off') else LARGE,
                                                           path/'b')
    restore(b, a)
    with accumulation(4) if follower=='stay_on' else nullcontext():
        try: ra = f(a)
        except RuntimeError as e:
            if follower!='deepcopy' or ending.exc is None: raise
            fails_alike(e, ending, f, path/'c')
            ra,f = None,lambda l: None
        a.fit(1)
    rb = f(b); b.fit(1)
    close(ra, rb)
    assert_same(a, b)
    is_clean(a)

class Clears(Callback):
    "A batch that is cancelled leaves no gradient: what we do, and plain fastai does not"
    def after_cancel_batch(self): self.opt.zero_grad()

def leave(ending, n_epoch, path):
    "Samples are accounted for, and what is left is what the large batch leaves, also after the epochs that follow"
    a,b = end(ending, path/'a', fit=lambda l,cbs: l.fit(n_epoch, cbs=cbs)),learner(LARGE, path/'b', Clears())
    n,(seen,stepped) = a.accumulate_step.counts,ending.counts(n_epoch)
    assert (n.n_samples,n.n_stepped,n.n_thrown)==(seen,stepped,seen-stepped)
    if ending.goes_on and ending.exc and ending.where in unseen: return   # a micro-batch is gone and not its window
    ending.plain().run(b, lambda cbs: b.fit(n_epoch, cbs=cbs))
    close(*([list(l.model.parameters()), opt_state(l.opt), l.opt.hypers] for l in (a,b)))

def search(l, cbs):
    with l.added_cbs(cbs): l.lr_find(num_it=20, show_plot=False)

table = list(make_endings())
by_columns = {(e.nm,e.where,e.at,e.order):e for e in table}
def endings(n, of=lambda e: True, also=()):
    "`n` of the table's endings with a follower each, and those of `also`, by follower"
    cases = [*also, *sample(((*k,f) for k,e in by_columns.items() if of(e) for f in followers), n)]
    return {f: [by_columns[c[:4]] for c in dict.fromkeys(cases) if c[4]==f] for f in followers}

ctrl_c = [('KeyboardInterrupt','after_backward',MID,0,f) for f in followers]
others = [('OutOfMemoryError','model',BOUNDARY,0,'fit'), ('CancelFitException','after_batch',MID,-1000,'turn_off')]
in_fits = endings(24, also=ctrl_c+others)
in_searches = endings(18, of=lambda e: not e.is_caught)

@pytest.mark.parametrize('follower', followers)
def test_follows_an_ending(follower, tmp_path):
    "After a fit, and after a search, of which the weights and rates stay, as in fastai itself"
    fits = [(e,{}) for e in in_fits[follower]]+[(e,dict(fit=search)) for e in in_searches[follower]]
    for i,(ending,kw) in enumerate(fits):
        print(ending, *kw)
        seed_all()
        (tmp_path/str(i)).mkdir()
        follow(ending, follower, tmp_path/str(i), **kw)

# each exception at each place
left = sample((*k, n, k[:2]) for k in by_columns for n in (1,2))

@pytest.mark.parametrize('name', dict.fromkeys(e.nm for e in table))
def test_what_is_left(name, tmp_path):
    for *k,n_epoch,_ in left:
        if k[0]!=name: continue
        print(*k, n_epoch)
        seed_all()
        leave(by_columns[tuple(k)], n_epoch, tmp_path)

# Other callbacks

cancels = [CancelTrainException, CancelEpochException, CancelFitException]
ways = dict(acc=lambda: [AccumulateStep(4)], micro=lambda: [MicroBatch(3)],
            coupled=lambda: [MicroBatch(3, coupled=True, prove=False)],
            exact=lambda: [MicroBatch(3, exact=True, prove=False)],
            both=lambda: [AccumulateStep(2),MicroBatch(3, coupled=True, prove=False)],
            sums=lambda: [AccumulateStep(4),GradAccumDtype()],
            memory=lambda: [GradientCheckpointing(),OffloadActivations()])
in_fit = dict.fromkeys(events+everywhere)

@pytest.mark.parametrize('way', ways)
@each(16, event=in_fit, exc=[KeyboardInterrupt,OSError,CancelBatchException,*cancels], order=[-1000,0,1000])
def test_nothing_is_left(way, event, exc, order):
    "However a fit ends, before, among or after our callbacks, the next fit is as if it had never been interrupted"
    n,at = itertools.count(1),1 if event.endswith('_fit') else 2
    def stop(cb):
        if next(n)==at: raise exc('stopped')
    a,b = (make_learner(make_dls(76, 8, shuffle=False), cbs=ways[way]()) for _ in range(2))
    with suppress(exc): a.fit(2, cbs=at_order(order, **{event:stop}))
    if way=='memory': a.opt.zero_grad()   # gradients are left, as in plain fastai
    is_clean(a)
    assert not any(p._post_accumulate_grad_hooks for p in a.model.parameters())
    assert way!='sums' or 'sums' not in vars(a.grad_accum_dtype)
    a.validate()
    a.model.load_state_dict(b.model.state_dict())
    a.create_opt(); a.spy.steps = []
    for l in (a,b): l.fit_one_cycle(2, .02)
    assert_same(a, b)
    is_clean(a)

@each(again=[True,False])
def test_ctrl_c_in_the_moment_a_block_ends(again, monkeypatch):
    "What it leaves lent is dropped when the next fit begins, also if the callback has gone"
    learn,end = make_learner(make_dls(N, BS), cbs=AccumulateStep(4)),state.Lent.end
    def interrupted(lent): return sys.exc_info()[0] is KeyboardInterrupt or end(lent)
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as m:
        m.setattr(state.Lent, 'end', interrupted)
        learn.fit(1, cbs=raising(KeyboardInterrupt, 'before_step'))
    assert '_with_events' in vars(learn)
    if not again: learn.remove_cb(AccumulateStep)
    learn.fit(1)
    is_clean(learn)
    assert len(learn.spy.steps)==(3 if again else 10)

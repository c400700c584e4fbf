"What a callback sees, and what is counted: nothing in the callbacks here knows of accumulation"
import pickle,weakref
from harness import *
from test_unusual import named
from fastai.callback.hook import ActivationStats
from fastai_accum.loop import in_charge

cases = dict(
    kept      = dict(cbs=lambda: AccumulateStep(4)),
    dropped   = dict(cbs=lambda: AccumulateStep(4), drop_last=True),
    asked     = dict(cbs=lambda: AccumulateStep(4, drop_last=False), n=80),
    n_samples = dict(cbs=lambda: AccumulateStep(n_samples=64), n=200, bs=24, large=72),
    shorter   = dict(cbs=lambda: AccumulateStep(4), n=92, skip=(3,14,15,33,60,61,62,63)),
    one       = dict(cbs=lambda: AccumulateStep(1), bs=32),
    micro     = dict(cbs=lambda: MicroBatch(5), bs=32),
    auto      = dict(cbs=MicroBatch, bs=32),
    coupled   = dict(cbs=lambda: MicroBatch(5, coupled=True), bs=32),
    both      = dict(cbs=lambda: [AccumulateStep(4), MicroBatch(3)]),
    both_drop = dict(cbs=lambda: [MicroBatch(3), AccumulateStep(4)], drop_last=True))
fits = dict(fit=lambda l: l.fit(2), one_cycle=lambda l: l.fit_one_cycle(3),
            lr_find=lambda l: l.lr_find(num_it=7, show_plot=False, suggest_funcs=None))

@each(12, case=cases, fit=fits)
def test_every_event(case, fit, tmp_path):
    "Events, counters, the schedule and the loss, at orders around fastai's own"
    a,b = pair(**cases[case], also=probes, fit=fits[fit], path=tmp_path)
    assert [o[:-2] for o in a.seen]==[o[:-2] for o in b.seen]
    assert {o[0] for o in b.seen}>=set(events)-({'after_epoch'} if fit=='lr_find' else set())
    close([o[-2:] for o in a.seen], [o[-2:] for o in b.seen])
    if fit!='lr_find': assert_same(a, b)

def test_boundary():
    "At the step and in `after_batch`, also where a window turned out to be the last; the page has what it is before"
    seen = []
    look = lambda cb: seen.append(cb.accumulate_step.is_boundary) if cb.training else None
    learn = make_learner(make_dls(92, 8, skip=range(20), shuffle=False),
                         cbs=[AccumulateStep(4), Callback(before_step=look, after_step=look, after_batch=look)])
    learn.fit(1)
    assert seen==[True]*9 and not learn.accumulate_step.is_boundary and learn.accumulate_step.window is None

def test_metrics_of_training():
    "Metrics of the training set count every micro-batch with its own loss; the loss that is logged is the window's"
    def fit(learn): learn.recorder.train_metrics = True; learn.fit(2)
    for c in 'kept','micro','coupled','both':
        a,b = same(**cases[c], fit=fit, metrics=[accuracy,Losses()], but=('values','final_record'))
        assert rel(a.recorder.values, b.recorder.values)[0]<TOL32   # accuracy is a float32 mean in fastai
        i = a.recorder.metric_names.index('train_losses')-1
        close(L(a.recorder.values).itemgot(i), L(b.recorder.values).itemgot(i))

class Gathers(EachMicro):
    def before_train(self): self.seen = []
    def after_batch(self):
        if self.training: self.seen.append(self.learn.pred.detach())
class OnTheInstance(Gathers):
    each_micro_batch = False
    def __init__(self): self.each_micro_batch = True

@each(case=['kept','micro','both'])
def test_each_micro_batch(case):
    "What gathers predictions, data or activations sees all of them; it says so in its class, or in the instance"
    a,b = pair(**cases[case], also=[Gathers, OnTheInstance, lambda: ActivationStats(modules=None)],
               fit=lambda l: l.fit(1, lr=0.))
    close(torch.cat(a.gathers.seen), torch.cat(b.gathers.seen))
    for l in (a,b): close(l.on_the_instance.seen, l.gathers.seen, 0)
    assert len(a.gathers.seen)>len(b.gathers.seen) and not any(m._forward_hooks for m in a.model.modules())

def test_only_fastais_bar_is_counted_for():
    "A callback, or the model, may have a bar of its own in `pbar`, or any other name of ours"
    class Bar:
        n = 0
        def update(self): self.n += 1   # as tqdm's: one more
    class Own(Callback):
        order = 61
        def before_fit(self): self.pbar = Bar()
        def after_batch(self): self.pbar.update()
    a,b = same(lambda: AccumulateStep(4), also=Own, model=named)
    assert a.own.pbar.n==b.own.pbar.n>0
    with accumulation(4): learn = train(bs=8, model=named)
    assert_same(learn, b)

@each(name=['run','run_train'])
def test_switched_off(name):
    "As fastai's own callbacks: `run` for one fit, `run_train` in training"
    for f in partial(AccumulateStep, 4),partial(MicroBatch, 3),partial(MicroBatch, 3, coupled=True):
        def cb(): cb = f(); setattr(cb, name, False); return cb
        a,b = pair(cb, 8, 8)
        assert rel(snapshot(a), snapshot(b))[0]==0   # bit for bit plain fastai

def test_switched_on_again():
    learn = make_learner(make_dls(64, 8), cbs=[AccumulateStep(4),MicroBatch(3)])
    learn.accumulate_step.run = False
    learn.fit(1); assert len(learn.spy.steps)==8 and learn.micro_batches.counts.n_micro==24
    learn.fit(1); assert len(learn.spy.steps)==8+2
    sizes = []
    learn.model[0].register_forward_hook(lambda m, x, y: sizes.append(len(y)))
    learn.validate(); assert max(sizes)==3
    learn.micro_batches.run_valid = False   # as `valid=False`
    learn.validate(); assert max(sizes)==16

class Unlabelled(DataLoader):
    "Some batches have no targets"
    def __iter__(self): return ((b[0],) if i in self.without else b for i,b in enumerate(super().__iter__()))

@each(without=[range(8), range(1,8), [0], [2]])
def test_batches_without_targets(without):
    "They make no step, and have their `after_batch`, as in plain fastai"
    def counts(cbs=None):
        dls,seen = make_dls(64, 8),[]
        dls.train.__class__,dls.train.without,dls.n_inp = Unlabelled,without,1
        learn = make_learner(dls, cbs=cbs)
        learn.fit(1, cbs=Callback(after_batch=lambda cb: seen.append(cb.training)))
        return sum(seen),len(learn.spy.steps),learn.train_iter
    assert counts(AccumulateStep(1))==counts()==(8,8-len(without),8) and counts(AccumulateStep(4))[0]==2

def test_a_subclass_with_its_own_before_fit():
    "It may set what it likes, and what the last fit has counted does not stay"
    class Calls(AccumulateStep):
        def before_fit(self): self.n_step = 4; super().before_fit()
    learn = make_learner(make_dls(64, 8), cbs=Calls(2))
    for _ in range(2):
        learn.fit(1)
        assert learn.accumulate_step.counts.sizes==[32,32]

class Validates(Callback):
    "Validates in the middle of an epoch, after the step or within it, which leaves the learner in validation"
    run_valid = False
    def __init__(self, event): self.seen = []; setattr(self, event, self._validate)
    def _validate(self):
        if self.iter==1: self.seen.append(list(self.learn.validate()))

@each(7, event=['after_batch','after_step','before_step'],
      case=['kept','dropped','n_samples','shorter','micro','coupled','both'])
def test_validates_in_the_middle_of_an_epoch(event, case):
    a,b = same(**cases[case], also=partial(Validates, event), but=('final_record','values'))
    close(a.validates.seen, b.validates.seen)
    assert len(a.validates.seen)==2 and in_charge(a).counts.n_steps==len(a.spy.steps)

class Own(Learner):
    "Overrides what fastai's loop calls"
    def one_batch(self, i, b): self.calls.append('one_batch'); Learner.one_batch(self, i, b)
    def _backward(self): self.calls.append('_backward'); (self.loss_grad*2).backward()
    def _step(self): self.calls.append('_step'); Learner._step(self)
    def _do_grad_opt(self): Learner._do_grad_opt(self); self.after.append(deepcopy(weights(self)))

@each(how=['class','instance'], way=[(8, lambda: AccumulateStep(4), 20), (32, lambda: MicroBatch(5, coupled=True), 6),
                                     (8, lambda: [AccumulateStep(4), MicroBatch(3)], 2*(9*3+2))])
def test_what_users_override(how, way):
    """Subclasses and methods put on the learner are used for each of the micro-batches, and the step, and what follows
    it, once a window"""
    names = 'one_batch','_backward','_step'
    def fit(learn):
        own = {k:partial(getattr(Own, k), learn) for k in (*names,'_do_grad_opt') if how=='instance'}
        vars(learn).update(own, calls=[], after=[])
        if how=='class': learn.__class__ = Own
        learn.fit_one_cycle(2)
        assert all(vars(learn)[k] is v for k,v in own.items()) and '_with_events' not in vars(learn)
    def count(l): return [l.calls.count(k) for k in names]
    bs,cbs,n = way
    a,b = same(cbs, bs, fit=fit)
    close(a.after, b.after)
    assert count(a)==[n+4,n,6] and count(b)==[6+4,6,6] and len(a.after)==6   # four batches in validation

@each(when=['after_batch','before_batch','after_epoch','before_validate'])
def test_saved_in_the_middle(when):
    "A learner that is exported, pickled or copied while it trains: what is replaced leaves itself out"
    copies = []
    def save(cb): copies.append(pickle.dumps(cb.learn))
    saver = type('Saver', (Callback,), {when: save, '__reduce__': lambda self: (Callback, ())})()
    learn = make_learner(make_dls(64, 8, shuffle=False), cbs=AccumulateStep(4))
    learn.remove_cb(Spy)
    learn.fit(1, cbs=saver)
    other = pickle.loads(copies[0])
    other.add_cb(Spy()).fit(1)
    assert len(other.spy.steps)==2

@each(event=['before_batch','after_batch','before_train','after_epoch'])
def test_added_when_a_fit_has_begun(event):
    "From the next loop over batches on"
    def add(cb):
        if not hasattr(cb.learn, 'accumulate_step'): cb.learn.accumulate(4)
    learn = make_learner(make_dls(64, 8), cbs=Callback(**{event:add}))
    learn.fit(2)
    before = 0 if event=='before_train' else 8
    assert len(learn.spy.steps)==before+(2 if before else 4)
    assert learn.accumulate_step.counts.n_steps==len(learn.spy.steps)-before and AccumulateStep(4).counts.n_steps==0

def test_batches_in_memory():
    "No more batches of the loader are alive than in plain training, and no graph of an earlier one"
    class Loader(DataLoader):
        def __iter__(self):
            for b in super().__iter__(): refs.append(weakref.ref(b[0])); yield b
    def most(*cbs):
        refs.clear()
        graphs,seen = [],[]
        def look(cb): graphs.append(weakref.ref(cb.learn.pred)); seen.append([alive(refs),alive(graphs)])
        dls = DataLoaders(Loader(Items(features(96), classes(96)), bs=8), make_dls(16, 16).valid)
        make_learner(dls, cbs=[*cbs,NoValid(),Callback(after_backward=look)]).fit(1)
        assert max(n for _,n in seen)==1
        return max(n for n,_ in seen)
    def alive(os): return sum(o() is not None for o in os)
    refs = []
    plain = most()
    for n_step in 2,4,6: assert most(AccumulateStep(n_step))<=plain

def test_a_slice_that_is_left_out():
    "With `n_samples` the window goes on until enough are in, also if a slice of its last batch was left out"
    drop = raising(CancelBatchException, 'after_loss', lambda cb: cb.micro.i==4)
    learn = make_learner(make_dls(96, 8, shuffle=False), cbs=[AccumulateStep(n_samples=24), MicroBatch(4), drop])
    learn.fit(1)
    n = learn.accumulate_step.counts
    assert (n.n_stepped,n.n_thrown,n.n_steps)==(92,4,4)   # 28 in the first window, then 24, 24 and 16

@each(kw=[{}, dict(coupled=True), dict(exact=True)])
def test_hooks_into_modules(kw):
    "The training is exact. Plain slices have an entry each; else it is that of the last slice"
    def run(bs, *cbs):
        learn = make_learner(make_dls(64, bs, shuffle=False), cbs=[ActivationStats(),*cbs], splitter=trainable_params)
        learn.fit(1)
        return learn
    a,b,sliced = run(32, MicroBatch(8, **kw)),run(32),run(8, AccumulateStep(4))
    assert_same(a, b)
    slices,ours,whole = ([o[0]['mean'] for o in l.activation_stats.stats] for l in (sliced,a,b))
    close(ours[0], slices[3 if kw else 0], TOL32)
    assert len(whole)==2 and len(ours)==(2 if kw else 8)
    assert not kw or abs(ours[0]-whole[0])>1e-3

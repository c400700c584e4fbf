"Bad input is refused with the argument, the value and what to do, before any weight has moved"
import pytest
from functools import partial
from harness import *
from fastai_accum.loss import *
from fastai_accum.patch import turn_on_accumulation

def test_counts():
    for name,v in itertools.product(['n_step','n_samples'], [0, -1, 2.5, 4., '4', True, [4], math.nan]):
        with pytest.raises(ValueError,
                           match=rf'AccumulateStep: {name} must be an int of at least 1, got {re.escape(repr(v))}'):
            AccumulateStep(**{name:v})

def test_arguments():
    for kw in dict(average=1), dict(average='mean'), dict(drop_last=0):
        (name,v), = kw.items()
        with pytest.raises(ValueError, match=f'AccumulateStep: {name} must be True, False or None, got {v!r}'):
            AccumulateStep(1, **kw)
    with pytest.raises(ValueError, match='AccumulateStep: weight must be a function'): AccumulateStep(1, weight=1.)
    for n_step,n_samples in (4,32),(None,None):
        match = f'give either n_step, which counts micro-batches, or n_samples, .*got {n_step=} and {n_samples=}'
        with pytest.raises(ValueError, match=match): AccumulateStep(n_step, n_samples=n_samples)
    with pytest.raises(ValueError, match='give either n_step'): make_learner(make_dls(64, 8), cbs=AccumulateStep)
    assert AccumulateStep(np.int64(4)).n_step==4 and type(MicroBatch(np.int64(5)).bs) is int

def test_arguments_of_micro_batch():
    for kw,msg in [(dict(bs=0), 'bs must be an int of at least 1'), (dict(bs=2.5), 'bs must be'),
                   (dict(bs=True), 'bs must be'), (dict(bs='big'), "or 'auto', got 'big'"),
                   (dict(coupled=1), 'coupled must be True or False, got 1'), (dict(valid=None), 'valid must be'),
                   (dict(prove='no'), "prove must be True or False, got 'no'"),
                   (dict(split=3), 'split must be a function'), (dict(weight=3), 'weight must be a function')]:
        with pytest.raises(ValueError, match=f'MicroBatch: .*{re.escape(msg)}'): MicroBatch(**{**dict(bs=8), **kw})

def refused(learn, match, exc=ValueError, fit=lambda l: l.fit(1)):
    "`fit` raises, and no weight has moved"
    old = [p.clone() for p in learn.model.parameters()]
    with pytest.raises(exc, match=match): fit(learn)
    assert all(torch.equal(o,p) for o,p in zip(old, learn.model.parameters()))

def trains(learn, bs=32):
    "After a refusal nothing is lost: `learn` trains as the large batch"
    big = make_learner(make_dls(64, bs))
    for l in (learn,big): l.fit(1)
    assert_same(learn, big)

@each(cls=[AccumulateStep,MicroBatch])
def test_added_twice(cls):
    refused(make_learner(make_dls(64, 8), cbs=[cls(4), cls(2)]), 'have this callback (twice|2 times)')
    cb = cls(4)
    learn = make_learner(make_dls(64, 8), cbs=cb)
    refused(learn, f'{cls.__name__}: .*(twice|2 times)', fit=lambda l: l.fit(1, cbs=cb))
    refused(learn, 'add it anew')   # fastai has removed one of the two
    learn.remove_cb(cb).add_cb(cls(4))
    refused(learn, 'have this callback (twice|2 times)', fit=lambda l: l.fit(1, cbs=cls(2)))
    trains(learn, 32 if cls is AccumulateStep else 8)

@each(cls=[GradientAccumulation, type('Own', (GradientAccumulation,), {})])
def test_together_with_fastais(cls):
    learn = make_learner(make_dls(64, 8), cbs=[cls(32), AccumulateStep(4)])
    refused(learn, 'remove_cb.GradientAccumulation')
    learn.remove_cb(cls)
    trains(learn)

def test_the_methods_replace():
    learn = make_learner(make_dls(64, 8)).accumulate(2).accumulate(n_samples=32, drop_last=True)
    cb, = [o for o in learn.cbs if isinstance(o, AccumulateStep)]
    assert learn.accumulate_step is cb and (cb.n_step,cb.n_samples,cb.drop_last)==(None,32,True)
    with pytest.raises(ValueError, match='n_step'): learn.accumulate(0)
    assert learn.accumulate_step is cb
    learn.micro_batch(4).micro_batch(8)
    assert [o.bs for o in learn.cbs if isinstance(o, MicroBatch)]==[8]

def test_reduction_none():
    learn = make_learner(make_dls(64, 8), loss_func=nn.CrossEntropyLoss(reduction='none'), cbs=AccumulateStep(4))
    refused(learn, "reduction='none'")
    refused(make_learner(make_dls(64, 8), loss_func=partial(F.cross_entropy, reduction='none'), cbs=AccumulateStep(4)),
            "reduction='none'")
    unreduced = lambda pred,targ: F.cross_entropy(pred, targ, reduction='none')
    refused(make_learner(make_dls(64, 8), loss_func=unreduced, cbs=AccumulateStep(4)), 'scalar outputs', RuntimeError)

def test_what_weight_returns():
    for v in -1., math.nan, math.inf:
        w = lambda pred,targ: torch.tensor(v)
        refused(make_learner(make_dls(64, 8), cbs=AccumulateStep(4, weight=w)), f'weight must return .*got {v}')
    for v in torch.ones(3), None, '3', True, torch.tensor(True), [1,2], (1,-1), (1,1,1):
        refused(make_learner(make_dls(64, 8), cbs=AccumulateStep(4, weight=lambda pred,targ: v)),
                'weight must return .* or a tuple of two, got')

@each(weight=[lambda y: len(y), lambda: 1, lambda pred, y, z: 1, lambda pred, *, y: 1, len],
      cb=[partial(AccumulateStep, 4), partial(MicroBatch, 4)])
def test_weight_of_another_signature(cb, weight):
    with pytest.raises(TypeError) as e: make_learner(make_dls(64, 8), cbs=cb(weight=weight)).fit(1)
    notes = ' '.join(e.value.__notes__)
    assert f'{cb.func.__name__}: ' in notes and 'weight(pred, *yb)' in notes

def test_never_a_step():
    for kw,n in (dict(n_step=9), 8), (dict(n_samples=65), 64):
        learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(**kw, drop_last=True))
        refused(learn, f'more than the {n} of an epoch and the tail is dropped')
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(9, drop_last=True))
    learn.validate(); learn.get_preds()   # nothing is trained, nothing is wrong

def test_warns_once():
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(9))
    with pytest.warns(UserWarning) as rec: learn.fit(3)
    said, = [str(o.message) for o in rec if 'AccumulateStep' in str(o.message)]
    assert 'a window of 9 micro-batches is more than the 8 of an epoch' in said and 'each epoch makes one step' in said

counts_steps = """n_steps nsteps acc_steps accum accumulation_steps accumulate_grad_batches n_batches num_steps
gradient_accumulation_steps grad_accum_steps update_freq every_k_schedule n_acc n_micro""".split()

def test_other_names():
    for name,f in itertools.product(counts_steps, (AccumulateStep,turn_on_accumulation)):
        with pytest.raises(TypeError, match=rf"AccumulateStep: .* '{name}'. Did you mean `AccumulateStep\(n_step=4\)`"):
            f(**{name:4})

accumulates = AccumulateStep,partial(Learner.accumulate, None),turn_on_accumulation
cuts = MicroBatch,partial(Learner.micro_batch, None)

@each(case=[
    (accumulates[::2], (), dict(n_acc=64), r'or `AccumulateStep\(n_samples=64\)`'),
    (accumulates[::2], (), dict(batch_size=64), r'Did you mean `AccumulateStep\(n_samples=64\)`'),
    (accumulates[::2], (), dict(accum_bs=64), r'Did you mean `AccumulateStep\(n_samples=64\)`'),
    (accumulates[::2], (), dict(bs=8), r'`MicroBatch\(bs=8\)`'),
    (accumulates[::2], (), dict(exact=True), r'`MicroBatch\(exact=True\)`'),
    (accumulates[::2], (), dict(nonsense=1), "no argument 'nonsense'. The arguments are n_step, n_samples"),
    (cuts[:1], (), dict(slice=8), r'Did you mean `MicroBatch\(bs=8\)`'),
    (cuts[:1], (), dict(batch_size=8), r'Did you mean `MicroBatch\(bs=8\)`'),
    (cuts[:1], (), dict(exat=True), r'Did you mean `MicroBatch\(exact=True\)`'),
    (cuts[:1], (), dict(n_steps=4), r'`AccumulateStep\(n_step=4\)`'),
    (cuts, (8,True), {}, 'positional argument'), (accumulates, (8,64), {}, 'positional argument')])
def test_the_right_argument(case):
    fs,args,kw,match = case
    for f in fs:
        with pytest.raises(TypeError, match=match): f(*args, **kw)

@each(case=[
    (AccumulateStep, lambda: 64/16, 'got 4.0; write 4$'),
    (AccumulateStep, lambda: [1,2,4], 'pass a function `pct -> int`'),
    (AccumulateStep, lambda: {0:1, 4:4}, 'got {0: 1, 4: 4}; .*pass a function `pct -> int`'),
    (AccumulateStep, lambda: make_learner(make_dls(64, 8)), r'got Learner; write learn.accumulate\(4\)'),
    (MicroBatch, lambda: make_learner(make_dls(64, 8)), r'got Learner; write learn.micro_batch\(4\)'),
    (AccumulateStep, lambda: AccumulateStep(4), 'got AccumulateStep; write its `.n_step`'),   # it is no schedule
    (turn_on_accumulation, lambda: AccumulateStep(4), 'got AccumulateStep; write its `.n_step`')])
def test_what_to_write(case):
    f,arg,match = case
    with pytest.raises(ValueError, match=match): f(arg())

def test_a_window_of_one_batch_has_no_note(capsys):
    "Batch norm sees all of it"
    def said(cb):
        learn = make_learner(make_dls(64, 16), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6,3)).double(), cbs=cb)
        with warnings.catch_warnings(): warnings.simplefilter('ignore'); learn.fit(1)
        return 'batch norm sees' in capsys.readouterr().out
    assert [said(AccumulateStep(n_samples=n)) for n in (4,16,32)]==[False,False,True]

def test_slices_above_the_batch():
    "The warning does not say to add what is there"
    def said(*cbs):
        learn = make_learner(make_dls(64, 16), cbs=[MicroBatch(64), *cbs])
        with pytest.warns(UserWarning, match='MicroBatch: bs=64 is above.* 16 .*no batch is cut') as found: learn.fit(1)
        return any('add AccumulateStep' in str(o.message) for o in found)
    assert said() and not said(AccumulateStep(2))

@each(cb=[AccumulateStep, MicroBatch])
def test_no_loader(cb):
    "An empty loader: the error says so, and speaks of the callback that was given"
    empty = DataLoader(Items(features(4), classes(4)), bs=8, drop_last=True)
    learn = make_learner(DataLoaders(empty, empty), cbs=cb(4))
    with pytest.raises(ValueError, match=f'{cb.__name__}: .*no training'): learn.fit(1)

def test_dropped_samples_are_said(capsys):
    "One line, once a fit, if more than 5 % of an epoch's samples reach no step"
    for n,said in (124,True), (1288,False):
        learn = make_learner(make_dls(n, 8, drop_last=True, x=features(n), y=classes(n)), cbs=AccumulateStep(4))
        learn.fit(2)
        out = capsys.readouterr().out
        assert out.count('reach no step')==said
        if said: assert 'drop_last=False' in out and re.search(r'(24|28) of the (120|124) samples', out)

@each(case=[(AccumulateStep, 'n_step', 0, 'AccumulateStep: n_step must be an int of at least 1, got 0'),
            (AccumulateStep, 'n_samples', 64, 'give either n_step'),
            (AccumulateStep, 'average', 'mean', 'average must be'),
            (MicroBatch, 'bs', 0, 'MicroBatch: bs must be an int of at least 1'),
            (MicroBatch, 'coupled', 1, 'coupled must be')])
def test_set_later(case):
    "An argument that is set on the callback is checked when the fit begins"
    cls,k,v,match = case
    cb = cls(4)
    learn = make_learner(make_dls(64, 8), cbs=cb)
    setattr(cb, k, v)
    refused(learn, match)

def test_a_loss_that_sums():
    "`reduction` on a function of one's own says that it sums"
    def loss(p, y): return F.cross_entropy(p, y, reduction='sum')
    loss.reduction = 'sum'
    same(lambda: MicroBatch(8), 32, 32, loss_func=loss)

class StepInBackward(Callback):
    "Hooks of the parameters step in the backward pass, and free the gradient"
    def before_fit(self):
        opts = {p:torch.optim.SGD([p], lr=.1) for p in self.learn.model.parameters()}
        def step(p):
            opts[p].step()
            p.grad = None
        self.hooks = [p.register_post_accumulate_grad_hook(step) for p in opts]

@each(case=[(8, lambda: AccumulateStep(4)), (32, lambda: MicroBatch(8)), (32, lambda: MicroBatch(8, exact=True)),
            (32, lambda: AccumulateStep(1))])
def test_a_step_in_the_backward_pass(case):
    "An optimizer that steps in hooks would step once per micro-batch: the first window refuses it by name"
    bs,way = case
    cb = way()
    learn = make_learner(make_dls(64, bs), cbs=[cb, StepInBackward()])
    with pytest.raises(RuntimeError, match=f'{cb}: .*no parameter has a gradient.*one optimizer'): learn.fit(1)
    for h in learn.step_in_backward.hooks: h.remove()
    learn.remove_cb(StepInBackward).fit(1)

def test_the_line_of_a_subclass():
    "`learn.micro_batch` makes a `MicroBatch`, so the line has all that this needs"
    class Mine(MicroBatch):
        def __init__(self, bs=4): super().__init__(bs, exact=True)
    class Wants(nn.Module):
        def __init__(self): super().__init__(); self.m = small_model()
        def forward(self, x):
            if len(x) not in (16,4): raise ValueError('16 or 4 rows')
            return self.m(x)
    learn = make_learner(make_dls(32, 16), Wants(), cbs=Mine(), splitter=trainable_params)
    refused(learn, r'write learn.micro_batch\(4, exact=True, prove=False\)')

def test_errors_of_micro_batch():
    "The errors name only callbacks that the user has added"
    learn = make_learner(make_dls(64, 32), cbs=MicroBatch(8), loss_func=nn.CrossEntropyLoss(reduction='none'))
    with pytest.raises(ValueError, match="MicroBatch.*reduction='none'") as e: learn.fit(1)
    assert 'AccumulateStep' not in str(e.value)
    learn = make_learner(make_dls(64, 32), cbs=MicroBatch(8, weight=lambda p, y: torch.ones(len(y))))
    with pytest.raises(ValueError, match='MicroBatch.*weight must return') as e: learn.fit(1)
    assert 'AccumulateStep' not in str(e.value)

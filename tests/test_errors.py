"Bad input is refused with the argument, the value and what to do, before any weight has moved; odd input works"
import pytest
from functools import partial
from harness import *
from fastai_accum.loss import *

@pytest.mark.parametrize('name', ['n_step','n_samples'])
@pytest.mark.parametrize('v', [0, -1, 2.5, 4., '4', True, [4], math.nan])
def test_counts(name, v):
    with pytest.raises(ValueError, match=rf'AccumulateStep: {name} must be an int of at least 1, got {re.escape(repr(v))}'): AccumulateStep(**{name:v})

def test_arguments():
    for kw in dict(average=1), dict(average='mean'), dict(drop_last=0):
        (name,v), = kw.items()
        with pytest.raises(ValueError, match=f'AccumulateStep: {name} must be True, False or None, got {v!r}'): AccumulateStep(1, **kw)
    with pytest.raises(ValueError, match='AccumulateStep: weight must be a function'): AccumulateStep(1, weight=1.)
    for n_step,n_samples in (4,32),(None,None):
        match = f'give either n_step, which counts micro-batches, or n_samples, which counts samples; got n_step={n_step} and n_samples={n_samples}'
        with pytest.raises(ValueError, match=match): AccumulateStep(n_step, n_samples=n_samples)
    with pytest.raises(ValueError, match='give either n_step'): make_learner(make_dls(64, 8), cbs=AccumulateStep)
    assert AccumulateStep(np.int64(4)).n_step==4

def refused(learn, match, exc=ValueError, fit=lambda l: l.fit(1)):
    "`fit` raises, and no weight has moved"
    old = [p.clone() for p in learn.model.parameters()]
    with pytest.raises(exc, match=match): fit(learn)
    assert all(torch.equal(o,p) for o,p in zip(old, learn.model.parameters()))

def trains(learn):
    "After a refusal nothing is lost: `learn` trains as the large batch"
    big = make_learner(make_dls(64, 32))
    for l in (learn,big): l.fit(1)
    assert_same(learn, big)

def test_together_with_fastais():
    learn = make_learner(make_dls(64, 8), cbs=[GradientAccumulation(32), AccumulateStep(4)])
    refused(learn, 'remove_cb.GradientAccumulation')
    learn.remove_cb(GradientAccumulation)
    trains(learn)

def test_twice():
    refused(make_learner(make_dls(64, 8), cbs=[AccumulateStep(4), AccumulateStep(2)]), 'have this callback 2 times')
    cb = AccumulateStep(4)
    learn = make_learner(make_dls(64, 8), cbs=cb)
    refused(learn, 'same instance is registered 2 times', fit=lambda l: l.fit(1, cbs=cb))
    trains(learn)
    assert learn.accumulate_step is cb
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(4))
    refused(learn, 'have this callback 2 times', fit=lambda l: l.fit(1, cbs=AccumulateStep(2)))
    trains(learn)
    assert learn.accumulate_step.n_step==4

def test_accumulate_replaces():
    learn = make_learner(make_dls(64, 8)).accumulate(2).accumulate(n_samples=32, drop_last=True)
    cb, = [o for o in learn.cbs if isinstance(o, AccumulateStep)]
    assert learn.accumulate_step is cb and (cb.n_step,cb.n_samples,cb.drop_last)==(None,32,True)
    with pytest.raises(ValueError, match='n_step'): learn.accumulate(0)
    assert learn.accumulate_step is cb

def test_reduction_none():
    learn = make_learner(make_dls(64, 8), loss_func=nn.CrossEntropyLoss(reduction='none'), cbs=AccumulateStep(4))
    refused(learn, "reduction='none'")
    refused(make_learner(make_dls(64, 8), loss_func=partial(F.cross_entropy, reduction='none'), cbs=AccumulateStep(4)), "reduction='none'")
    unreduced = lambda pred,targ: F.cross_entropy(pred, targ, reduction='none')
    refused(make_learner(make_dls(64, 8), loss_func=unreduced, cbs=AccumulateStep(4)), r'one number, got shape \(8,\)')

def test_losses_of_predictions():
    "`get_preds(with_loss=True)` sets the reduction to 'none' for a while"
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(4))
    assert len(learn.get_preds(with_loss=True)[2])==24

@pytest.mark.parametrize('tensors', [False, True])
@pytest.mark.parametrize('v', [-1., math.nan, math.inf])
def test_weight_values(v, tensors, monkeypatch):
    if tensors: monkeypatch.setattr('fastai_accum.core.is_remote', lambda t: True)   # as on an accelerator
    w = lambda pred,targ: torch.tensor(v)
    refused(make_learner(make_dls(64, 8), cbs=AccumulateStep(4, weight=w)), f'weight must return a finite number of at least 0, got {v}')

@pytest.mark.parametrize('v', [torch.ones(3), None, 'a', [1.], True])
def test_weight_types(v):
    refused(make_learner(make_dls(64, 8), cbs=AccumulateStep(4, weight=lambda pred,targ: v)), 'weight must return one number, got')

def test_never_a_step():
    for kw,n in (dict(n_step=9), 8), (dict(n_samples=65), 64):
        learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(**kw, drop_last=True))
        refused(learn, f'is more than the {n} (micro-batches|samples) of an epoch and the tail is dropped')
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(9, drop_last=True))
    learn.validate(); learn.get_preds()   # nothing is trained, nothing is wrong

def test_warns_once():
    learn = make_learner(make_dls(64, 8), cbs=AccumulateStep(9))
    with pytest.warns(UserWarning) as rec: learn.fit(3); learn.fit(1)
    assert [str(o.message) for o in rec if 'AccumulateStep' in str(o.message)]==[
        'AccumulateStep: n_step=9 is more than the 8 micro-batches of an epoch. A window ends when its epoch ends, so each epoch makes one step']

class Named(nn.Module):
    "Two inputs, a dictionary of two outputs, and a parameter that is never used"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.unused = nn.Linear(6,3).double(),nn.Linear(6,1).double(),nn.Linear(6,1).double()
    def forward(self, x1, x2): return dict(classes=self.a(x1*x2), value=self.b(x1))

@pytest.mark.parametrize('as_tuple', [False, True])
def test_several_inputs_and_targets(as_tuple):
    "Two inputs, two targets, predictions in a dictionary or a tuple, gradients that are None"
    def loss(pred, c, v):
        pc,pv = pred if as_tuple else (pred['classes'],pred['value'])
        return F.cross_entropy(pc, c) + F.mse_loss(pv[:,0], v)
    def train(bs, cb=None):
        x = features(76)
        trn = DataLoader(Items(x, (features(76,seed=9), classes(76), features(76,1,seed=8)[:,0])), bs=bs)
        learn = make_learner(DataLoaders(trn, trn), Named(), loss_func=loss, splitter=trainable_params, cbs=cb)
        learn.dls.n_inp = 2
        if as_tuple: learn.add_cb(Callback(after_pred=lambda cb: setattr(cb.learn, 'pred', tuple(cb.learn.pred.values()))))
        learn.fit_one_cycle(2)
        return learn
    a,b = train(8, AccumulateStep(4)),train(32)
    assert_same(a, b)
    assert a.model.unused.weight.grad is None

def test_dictionary_of_weight_zero():
    "The cut reaches predictions in a dictionary"
    mask = torch.ones(64).double(); mask[8:16] = 0
    def loss(pred, targ, mask): return (((pred['classes']-targ[:,None])**2).mean(1)*mask).sum()/mask.sum()
    def train(bs, cb=None):
        trn = DataLoader(Items(features(64), (features(64,seed=9), features(64,1,seed=8)[:,0], mask)), bs=bs)
        learn = make_learner(DataLoaders(trn, trn), Named(), loss_func=loss, splitter=trainable_params, cbs=cb)
        learn.dls.n_inp = 2
        learn.fit(1)
        return learn
    a,b = train(8, AccumulateStep(4, weight=lambda pred,targ,mask: mask.sum())),train(32)
    assert_same(a, b, but=('values','final_record'))   # the validation loader is the training loader, in other batches

def test_frozen_groups():
    def train(bs, cb=None):
        learn = make_learner(make_dls(76, bs), cbs=cb)
        learn.freeze(); learn.fit_one_cycle(1)
        learn.unfreeze(); learn.fit_one_cycle(2, slice(1e-3,1e-2))
        return learn
    assert_same(train(8, AccumulateStep(4)), train(32))

def test_interrupted_window():
    "After an exception in mid-window the next fit is that of a learner that never accumulated"
    def stop(cb):
        if cb.train_iter==1 and cb.micro.i==6: raise exc
    for exc in KeyboardInterrupt(), RuntimeError('out of memory'):
        a,b = (make_learner(make_dls(76, bs), cbs=cb, opt_func=SGD) for bs,cb in ((8,AccumulateStep(4)), (32,None)))
        breaker = Callback(before_backward=stop)
        with pytest.raises(type(exc)): a.fit(1, cbs=breaker)
        n = a.accumulate_step.counts
        assert a.accumulate_step.window is None and (n.n_samples,n.n_stepped,n.n_thrown)==(56,32,24)
        b.fit(1)
        b.model.load_state_dict(a.model.state_dict()); b.opt.load_state_dict(a.opt.state_dict())
        for l in (a,b): l.spy.steps = []; random.seed(1); l.dls.train.rng = random.Random(0); l.fit(2)
        assert_same(a, b)
        assert all(cb.run for cb in a.cbs)
    # removed instead: no gradient is left
    a = make_learner(make_dls(76, 8), cbs=AccumulateStep(4))
    with pytest.raises(RuntimeError): a.fit(1, cbs=breaker)
    a.remove_cb(AccumulateStep)
    assert all(p.grad is None or not p.grad.any() for p in a.model.parameters())
